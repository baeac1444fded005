"""Prompts are those that the server makes: by vLLM's own code, and compared with a real server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from flywheel.errors import TrainError
from flywheel.round import RoundTask
from flywheel.training.chat import ChatFormat, served_format
from flywheel.training.engine import Engine, EngineSettings
from tests.conftest import VllmServer
from tests.training.rollouts import task
from tests.training.test_directory import POLICY

pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATE = """\
{%- for tool in tools or [] %}{{ '<tool>' + (tool | tojson) }}{%- endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<call>' }}
{%- for name, value in call.function.arguments | items %}{{ name + '=' + (value | tojson) + ';' }}{%- endfor %}
{%- if call.function.name == 'break' %}{{ 1 // 0 }}{%- endif %}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('' if thinking else '<no thought>') }}{%- endif %}"""

SEARCH = {"function": {"parameters": {"type": "object"}, "name": "search", "strict": True}, "type": "function"}


def called(name: str, arguments: str) -> list[dict[str, Any]]:
    """A dialogue in which a tool was called before."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße, 你好 👋"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": name, "content": "nothing"},
        {"role": "assistant", "content": "I found nothing."},
        {"role": "user", "content": "And now?"},
    ]


def settings(**values: Any) -> EngineSettings:
    return EngineSettings(
        model="tiny",
        max_model_len=512,
        max_lora_rank=8,
        seed=1,
        gpu_memory_utilization=0.3,
        kv_cache_gib=1,
        cpu_threads=1,
        **values,
    )


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's, for the demo's policy with a template like those of models that call tools."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    model = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(POLICY, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    made = renderer_from_config(
        AsyncEngineArgs(str(model), max_model_len=512, dtype="float32").create_engine_config()
    )
    yield made
    made.shutdown()


def encoded(
    renderer: Any, tasks: list[RoundTask], chat: ChatFormat | None = None
) -> tuple[list[str], dict[str, str]]:
    """Prompts as text, and what was refused; only vLLM's engine is left out."""
    engine = Engine(settings(**({"chat": chat} if chat else {})))
    engine._llm = SimpleNamespace(renderer=renderer, get_tokenizer=renderer.get_tokenizer)
    prompts, refused = asyncio.run(engine.encode(tasks))
    return [renderer.get_tokenizer().decode(prompt.token_ids) for prompt in prompts], refused


def asked(name: str, prompt: list[dict[str, Any]], tools: list[dict[str, Any]]) -> RoundTask:
    return RoundTask(task_id=name, query="And now?", answer="", prompt=prompt, tools=tools)


@pytest.mark.slow
def test_earlier_calls_and_tools_are_rendered_as_the_server_renders_them(renderer: Any) -> None:
    """The arguments are JSON text in a trace and a mapping in a template; tools have one order of keys."""
    some = asked("t-1", called("search", '{"q":"é","n":1}'), [SEARCH])
    before = some.model_copy(deep=True)
    [text], refused = encoded(renderer, [some])
    assert refused == {}
    assert text == (
        '<tool>{"type": "function", "function": {"name": "search", "description": null, "parameters": '
        '{"type": "object"}, "strict": true}}'
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße, 你好 👋<|im_end|>\n"
        '<|im_start|>assistant\n<call>q="é";n=1;<|im_end|>\n<|im_start|>tool\nnothing<|im_end|>\n'
        "<|im_start|>assistant\nI found nothing.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n<no thought>"
    )
    assert some == before


@pytest.mark.slow
def test_a_task_on_which_the_template_breaks_costs_itself_alone(renderer: Any) -> None:
    broken = asked("t-broken", called("break", "{}"), [])
    texts, refused = encoded(renderer, [task("t-1"), broken, task("t-2")])
    assert len(texts) == 2
    assert list(refused) == ["t-broken"]


@pytest.mark.slow
def test_what_the_server_is_told_of_templates_counts(renderer: Any, tmp_path: Path) -> None:
    chat = served_format(["--dtype", "float32", "--default-chat-template-kwargs", '{"thinking": true}'])
    [text], _ = encoded(renderer, [task()], chat)
    assert text.endswith("<|im_start|>assistant\n")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[-1].content }}!")
    [text], _ = encoded(renderer, [task()], served_format([f"--chat_template={other}"]))
    assert text == "What is 3 plus 4?!"
    with pytest.raises(TrainError, match=r"cannot read the chat template /nowhere\.jinja"):
        encoded(renderer, [task()], served_format(["--chat-template", "/nowhere.jinja"]))


def test_arguments_of_the_server_that_cannot_be_read_are_told() -> None:
    assert served_format([]) == ChatFormat()
    for wrong in ("{thinking}", "[1]"):
        with pytest.raises(TrainError, match=r"--default-chat-template-kwargs.*serving\.extra_args"):
            served_format(["--default-chat-template-kwargs", wrong])


@pytest.mark.slow
def test_a_real_server_makes_the_same_tokens(renderer: Any, vllm_server: VllmServer, tmp_path: Path) -> None:
    """Of the same messages, with the same template."""
    (tmp_path / "t.jinja").write_text((POLICY / "chat_template.jinja").read_text())
    chat = served_format(["--chat-template", str(tmp_path / "t.jinja")])
    engine = Engine(settings(chat=chat))
    engine._llm = SimpleNamespace(renderer=renderer, get_tokenizer=renderer.get_tokenizer)
    some = asked("t-1", called("search", '{"q":"é"}'), [])
    [prompt], _ = asyncio.run(engine.encode([some]))
    told = httpx2.post(
        f"{vllm_server.url}/tokenize",
        headers=vllm_server.headers,
        json={"model": vllm_server.base_model, "messages": some.prompt, "add_special_tokens": False},
        timeout=60,
    )
    assert told.json()["tokens"] == list(prompt.token_ids)
