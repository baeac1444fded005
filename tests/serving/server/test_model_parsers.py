"""Parsers by a model's family: from its chat template, its type and its name, and all of them are vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.serving.server.model_parsers import _FAMILIES, Parsers, parsers_of
from flywheel.serving.server.vllm_command import chat_arguments, chat_template
from tests.conftest import POLICY
from tests.factories.chat_templates import template_of


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
def test_every_parser_is_one_of_vllms() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools, reasoning = {*ToolParserManager.list_registered()}, {*ReasoningParserManager.list_registered()}
    assert {"hermes", "mistral", "llama3_json"} <= tools
    assert {"qwen3", "deepseek_r1"} <= reasoning
    assert {family.tool for family in _FAMILIES} <= tools
    assert {family.reasoning for family in _FAMILIES} - {None} <= reasoning


@pytest.mark.parametrize(
    ("name", "tool", "reasoning"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen/Qwen3-8B", "hermes", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "hermes", None),
        ("Qwen/Qwen3-4B-Thinking-2507", "hermes", "qwen3"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder", None),
        ("Qwen/QwQ-32B", "hermes", "deepseek_r1"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json", None),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic", None),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes", None),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral", None),
        ("mistralai/Magistral-Small-2509", "mistral", "mistral"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek_v3", "deepseek_r1"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek_v3", "deepseek_r1"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3", None),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek_v31", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32", "deepseek_v3"),
        ("zai-org/GLM-4.5-Air", "glm45", "glm45"),
        ("zai-org/GLM-4.7", "glm47", "glm47"),
        ("openai/gpt-oss-20b", "openai", "openai_gptoss"),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2", None),
        ("MiniMaxAI/MiniMax-M2", "minimax_m2", "minimax_m2"),
        ("somebody/something-7b", None, None),
    ],
)
def test_by_name(name: str, tool: str | None, reasoning: str | None) -> None:
    assert parsers_of(name) == Parsers(tool, reasoning)


def model(folder: Path, kind: str, template: str | list[dict[str, str]] | None = None) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template)
    elif template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


DISTILLED = "{{'<｜tool▁calls▁begin｜>' + '```json' }}{{'<｜Assistant｜><think>\\n'}}"
HYBRID = "{{ '<tool_call>' }}{%- if enable_thinking is defined and enable_thinking is false %}"


@pytest.mark.parametrize(
    ("kind", "template", "tool", "reasoning"),
    [
        ("qwen3", HYBRID, "hermes", "qwen3"),
        ("qwen3", "{{ '<tool_call>' }}", "hermes", None),
        ("qwen3_moe", "<tool_call>\n<function={{ name }}>\n<parameter=a>", "qwen3_coder", None),
        (
            "qwen2",
            "{{'<｜tool▁calls▁begin｜>' + '```json' }}{{'<｜Assistant｜><think>\\n'}}",
            "deepseek_v3",
            "deepseek_r1",
        ),
        ("deepseek_v3", "{{'<｜tool▁calls▁begin｜>'}}", "deepseek_v31", "deepseek_v3"),
        ("llama4", "{{ '<|python_tag|>' }}", "llama4_pythonic", None),
        ("qwen2", "{{ '[TOOL_CALLS]' }}", "mistral", None),
        ("mistral", "{{ '<tool_call>' }}", "hermes", None),
        ("glm4_moe", "<tool_call>{function-name}\n<arg_key>", "glm45", None),
        ("glm4_moe", "<tool_call>{function-name}<arg_key>", "glm47", None),
        ("ernie4_5_moe", "{{ '<tool_call>' }}", "ernie45", None),
        ("llama", "{{ '<|python_tag|>' }}", "llama3_json", None),
        ("llama", "{{ '<tool_call>' }}", "hermes", None),
        ("llama", "{{ messages }}", None, None),
        ("mistral", "{{ '[TOOL_CALLS]' }}", "mistral", None),
        ("mistral3", "{{ '[TOOL_CALLS]' }}[THINK]", "mistral", "mistral"),
        ("glm4_moe", "{%- if enable_thinking %}", "glm45", "glm45"),
        ("", None, None, None),
    ],
)
def test_by_type_and_template(
    tmp_path: Path, kind: str, template: str | None, tool: str | None, reasoning: str | None
) -> None:
    assert parsers_of(model(tmp_path / "policy", kind, template)) == Parsers(tool, reasoning)


@pytest.mark.training
@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("deepseekv3", "deepseek_v3"), ("gemma4", "gemma4"), ("glm4moe", "glm45"), ("gptoss", "openai"),
        ("lfm2_v2", "lfm2"), ("llama3_1", "llama3_json"), ("qwen2_5", "hermes"), ("qwen3", "hermes"),
        ("qwen3_6", "qwen3_coder"), ("phi3", None),
    ],
)  # fmt: skip
def test_genuine_templates(tmp_path: Path, name: str, tool: str | None) -> None:
    assert parsers_of(model(tmp_path / "policy", "", template_of(name))).tool == tool


def test_the_template_goes_before_the_type_and_the_type_before_the_name(tmp_path: Path) -> None:
    assert parsers_of(str(tmp_path / "Qwen3-Coder")) == Parsers("qwen3_coder", None), "before a download"
    assert parsers_of(model(tmp_path / "Qwen3-Coder", "mistral")) == Parsers("mistral", None)
    assert parsers_of(model(tmp_path / "Mistral-7B", "mistral", HYBRID)) == Parsers("hermes", None)
    # The type of these is that of another family.
    assert parsers_of(model(tmp_path / "xLAM-2", "qwen2")) == Parsers("xlam", None)
    assert parsers_of(model(tmp_path / "Hermes-3", "mistral", HYBRID)) == Parsers("hermes", None)


def test_a_template_among_the_tokenizers_settings(tmp_path: Path) -> None:
    base = model(tmp_path / "policy", "qwen3", [{"name": "default", "template": HYBRID}])
    assert parsers_of(base) == Parsers("hermes", "qwen3")


def test_what_the_hubs_client_keeps_is_looked_at(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--me--policy"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    model(repository / "snapshots" / "abc", "qwen3", HYBRID)
    assert parsers_of("me/policy") == Parsers("hermes", "qwen3")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"model_type": 7}', b"[" * 100_000])
def test_damaged_files_say_nothing(tmp_path: Path, content: bytes) -> None:
    for name in ("config.json", "chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(content)
    assert parsers_of(str(tmp_path)) == Parsers()


def test_settings_go_before_the_family() -> None:
    assert parsers_of(str(POLICY)) == Parsers("hermes", None), "the demo's model is a Qwen that does not think"
    assert parsers_of("Qwen/Qwen3-8B", "pythonic", "none") == Parsers("pythonic", None)
    assert parsers_of("Qwen/Qwen3-8B", "none") == Parsers(None, "qwen3")


def test_a_round_has_the_parsers_that_the_server_is_started_with(tmp_path: Path) -> None:
    def given(**serving: Any) -> list[str]:
        return chat_arguments(str(tmp_path / "Qwen3-4B"), Config.model_validate({"serving": serving}).serving)

    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    assert given(max_model_len=512) == ["--max-model-len", "512", *tools, "--reasoning-parser", "qwen3"]
    own = given(tool_call_parser="none", reasoning_parser="deepseek_r1", extra_args=["--seed", "3"])
    assert own == ["--reasoning-parser", "deepseek_r1", "--seed", "3"]


def test_the_chat_template_of_a_server_is_found_without_vllm() -> None:
    assert chat_template([]) is chat_template(["--seed", "3"]) is None
    assert chat_template(["--chat-template", "a.jinja", "--chat_template=b={{ 1 }}"]) == "b={{ 1 }}"
    assert chat_template(["--seed", "3", "--chat-template", "a.jinja"]) == "a.jinja"
