"""Chooses vLLM's parsers of tool calls and reasoning for a model, and says whether its chat template writes tools.

A model's family is recognised by the format of tool calls in its chat template, by the type in its `config.json`, and
by its name, which alone is there before a download. Names of parsers are those of vLLM 0.32.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

NO_PARSER: Final = "none"
_DEEPSEEK: Final = r"<｜tool▁calls▁begin｜>(?=.*```json)"
_LLAMA: Final = r'<\|python_tag\|>|"parameters": dictionary of argument name'
_XML: Final = r"<function="
_JSON: Final = r"<tool_call>"
_THINKS: Final = re.compile(r"enable_thinking|<think>(\\n|\n)?['\"]|<seed:think>|\[THINK\]")
"""In a chat template: reasoning can be switched on, or the answer begins with it."""
_TOOLS: Final = re.compile(r"\{[{%](?:(?![%}]\}).)*\btools\b", re.DOTALL)
"""In a chat template: the variable with the tools."""
TOOLS_REMEDY: Final = (
    "Name a chat template that writes tools, for server and rounds: serving: {extra_args: [--chat-template, FILE]}."
)
_ASKED_TO: Final = frozenset({"deepseek_v3", "deepseek_v4", "openai_gptoss"})
"""Reasoning parsers that depend on the request or the format: they also suit models that do not reason."""
_BY_DEFAULT: Final = frozenset({"qwen3", "glm45", "glm47", "minimax_m2"})
_BY_NAME: Final = re.compile(r"think|reason|r1|qwq|magistral|seed[-_]oss")
_NEVER: Final = re.compile(r"instruct|coder")


class Parsers(NamedTuple):
    """Names of vLLM's parsers; None if the model needs none or none is known."""

    tool: str | None = None
    reasoning: str | None = None


class _Family(NamedTuple):
    """A model family and its parsers."""

    format: str
    """Pattern for its tool calls, as its chat template writes them; empty if it is not known."""
    types: str
    """Pattern for the beginning of the model type; empty if it has the type of another family."""
    names: str
    """Pattern for any part of the model's name, in small letters."""
    tool: str
    reasoning: str | None = None
    """For the models of the family that reason."""


_FAMILIES: Final = (
    # Of those with one format, the first stands for models of other types and names.
    _Family(_DEEPSEEK, "", r"r1[-_]distill|deepseek[-_]r1", "deepseek_v3", "deepseek_r1"),
    _Family(_DEEPSEEK, "deepseek_v3$", r"deepseek[-_]v3(?!\.[12])", "deepseek_v3", "deepseek_r1"),
    _Family(r"<｜tool▁calls▁begin｜>", "", r"deepseek[-_]v3\.1", "deepseek_v31", "deepseek_v3"),
    _Family(
        r"\[TOOL_CALLS\]", "mi[sx]tral|ministral", r"mi[sx]tral|ministral|devstral|magistral", "mistral", "mistral"
    ),
    _Family(_XML, "qwen3_5", r"qwen3[-_]coder|qwen3\.[5-9]", "qwen3_coder", "qwen3"),
    _Family(r"\{function-name\}<arg_key>", "glm4_moe_lite|glm_moe", r"glm[-_](4\.7|5)", "glm47", "glm47"),
    _Family(r"<arg_key>", "glm4_moe", r"glm[-_]4\.[56]", "glm45", "glm45"),
    _Family(_JSON, "", r"hermes", "hermes"),
    _Family(_JSON, "", r"qwq", "hermes", "deepseek_r1"),
    _Family(_JSON, "qwen3", r"qwen3", "hermes", "qwen3"),
    _Family(_JSON, "qwen2", r"qwen2", "hermes", "deepseek_r1"),
    _Family(_LLAMA, "", r"llama[-_]?3", "llama3_json"),
    _Family(_LLAMA, "llama4", r"llama[-_]?4", "llama4_pythonic"),
    _Family("", "", r"xlam", "xlam"),
    _Family("", "", r"functiongemma", "functiongemma"),
    _Family("", "", r"phi[-_]4[-_]mini", "phi4_mini_json"),
    _Family("", "deepseek_v4", r"deepseek[-_]v4", "deepseek_v4", "deepseek_v4"),
    _Family("", "deepseek_v32", r"deepseek[-_]v3\.2", "deepseek_v32", "deepseek_v3"),
    _Family(r"<\|channel\|>commentary", "gpt_oss", r"gpt[-_]oss", "openai", "openai_gptoss"),
    _Family("", "kimi_k2", r"kimi[-_]k2", "kimi_k2", "kimi_k2"),
    _Family("", "minimax_m2", r"minimax[-_]m2", "minimax_m2", "minimax_m2"),
    _Family("", "granitemoehybrid", r"granite[-_]4", "granite4"),
    _Family("", "granite", r"granite[-_]3", "granite"),
    _Family(r"<\|tool_call>call:", "gemma4", r"gemma[-_]?4", "gemma4", "gemma4"),
    _Family("", "seed_oss", r"seed[-_]oss", "seed_oss", "seed_oss"),
    _Family("", "olmo3", r"olmo[-_]?3", "olmo3", "olmo3"),
    _Family("", "hunyuan_v1_moe", r"hunyuan[-_]a13b", "hunyuan_a13b", "hunyuan_a13b"),
    _Family("", "ernie4_5", r"ernie[-_]4\.5", "ernie45", "ernie45"),
    _Family("", "internlm2", r"internlm2", "internlm"),
    _Family("", "jamba", r"jamba", "jamba"),
    _Family(r"<\|tool_call_start\|>", "lfm2", r"lfm2", "lfm2"),
    _Family("", "apertus", r"apertus", "apertus"),
)


def folder_of(base: str) -> Path | None:
    """The directory of a model on this machine: a local one, or the snapshot in the hub's cache; None without one."""
    if Path(base).is_absolute():
        return Path(base)
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = hub / f"models--{base.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        return snapshot if (snapshot / "config.json").exists() else None
    except OSError:
        return None


def weight_bytes(base: str) -> int:
    """The size of a model's weights; 0 if they are not on this machine."""
    if (folder := folder_of(base)) is None:
        return 0
    # Some repositories have the same weights again under other names.
    patterns = ("model*.safetensors", "*.safetensors", "*.bin")
    files = next(filter(None, ([*folder.glob(pattern)] for pattern in patterns)), [])
    return sum(file.stat().st_size for file in files if file.exists())


def parsers_of(base: str, tool: str | None = None, reasoning: str | None = None) -> Parsers:
    """The parsers of the model `base`. Names that are given take precedence; `none` is no parser."""
    known = _known(base.rstrip("/").lower().rpartition("/")[2], folder_of(base))
    return Parsers(_chosen(tool, known.tool), _chosen(reasoning, known.reasoning))


def writes_tools(base: str, template: str | None = None) -> bool | None:
    """Whether a chat template uses the tools of a request: that of the model, or `template`, a file or the template
    itself. None if it is not on this machine."""
    if template is None:
        text = template_in(folder) if (folder := folder_of(base)) else ""
    else:
        try:
            text = Path(template).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return None
        except OSError:
            text = template if "{" in template else ""
    return bool(_TOOLS.search(text)) if text else None


def template_words(base: str, template: str | None) -> str:
    """A chat template in words, for an error: that of the model, or `template`, a file or the template itself."""
    return f"the chat template {' '.join(template.split())[:200]}" if template else f"{base}'s chat template"


def _chosen(given: str | None, known: str | None) -> str | None:
    return known if given is None else None if given == NO_PARSER else given


def _known(name: str, folder: Path | None) -> Parsers:
    kind = str(config_in(folder).get("model_type") or "") if folder else ""
    template = template_in(folder) if folder else ""
    family = _family(name, kind, template)
    if family is None:
        return Parsers()
    reasoning = family.reasoning
    return Parsers(family.tool, reasoning if reasoning and _thinks(name, template, reasoning) else None)


def _family(name: str, kind: str, template: str) -> _Family | None:
    formats = (family.format for family in _FAMILIES if family.format)
    written = next((each for each in formats if re.search(each, template, re.DOTALL)), "")
    of_format = [family for family in _FAMILIES if written in ("", family.format)]
    named = [family for family in of_format if re.search(family.names, name)]
    typed = (
        family
        for family in _FAMILIES
        if (family in of_format or not family.format) and family.types and re.match(family.types, kind)
    )
    # The type of a family that has that of another one says nothing of it.
    without_type = (family for family in named if not family.types)
    return next(itertools.chain(without_type, typed, named, of_format if written else ()), None)


def _thinks(name: str, template: str, reasoning: str) -> bool:
    if reasoning in _ASKED_TO:
        return True
    # Without an end of reasoning, vLLM's parsers take the whole answer for reasoning.
    if _NEVER.search(name) and not _BY_NAME.search(name):
        return False
    return bool(_THINKS.search(template)) if template else reasoning in _BY_DEFAULT or bool(_BY_NAME.search(name))


def config_in(folder: Path) -> dict[str, Any]:
    """The object in the model's `config.json`; empty if it cannot be read."""
    found = _json(folder / "config.json")
    return found if isinstance(found, dict) else {}


def template_in(folder: Path) -> str:
    """The model's chat template with all its variants; empty without one."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    for file in ("chat_template.json", "tokenizer_config.json"):
        settings = _json(folder / file)
        if isinstance(settings, dict) and (template := settings.get("chat_template")):
            return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
    return ""


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
