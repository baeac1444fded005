"""Genuine chat templates that TRL ships, each on the demo's policy with the special tokens of its model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from flywheel.records.round import RoundTask
from flywheel.training.data.samples import RecordedReply
from tests.factories.chat_rendering import Served, rendering
from tests.factories.round import POLICY
from tests.factories.task import round_task


@dataclass(frozen=True)
class Family:
    """The tokens that the models of a template have. `ends` are those of its generation_config.json."""

    special: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str | None = None
    plain: tuple[str, ...] = ()


_CHATML: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_QWEN_ENDS: Final = ("<|im_end|>", "<|endoftext|>")
_THINK: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_GEMMA: Final = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_DEEPSEEK: Final = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_HARMONY: Final = ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext", "startoftext")
_LLAMA: Final = ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "end_of_text", "python_tag")

FAMILIES: Final = {
    "qwen2_5": Family(_CHATML, _QWEN_ENDS, plain=_THINK[2:]),
    "qwen3": Family(_CHATML, _QWEN_ENDS, plain=_THINK),
    "qwen3_5_think": Family(_CHATML, _QWEN_ENDS, plain=_THINK),
    "qwen3_5_nothink": Family(_CHATML, _QWEN_ENDS, plain=_THINK),
    "llama3_1": Family(
        tuple(f"<|{name}|>" for name in _LLAMA), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "<|begin_of_text|>"
    ),
    "gemma": Family(_GEMMA, ("<end_of_turn>", "<eos>"), "<bos>"),
    "gemma3": Family(_GEMMA, ("<end_of_turn>", "<eos>"), "<bos>"),
    "phi3": Family(
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        ("<|end|>", "<|assistant|>", "<|endoftext|>"),
        "<s>",
    ),
    "gptoss": Family(
        tuple(f"<|{name}|>" for name in _HARMONY), ("<|return|>", "<|endoftext|>", "<|call|>"), "<|startoftext|>"
    ),
    "lfm2_2_5": Family(
        ("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<|im_end|>",), "<|startoftext|>", _THINK
    ),
    "glm4moe": Family(
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        plain=(*_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    ),
    "deepseekv3": Family(_DEEPSEEK, _DEEPSEEK[1:2], _DEEPSEEK[0]),
    "deepseek_r1_distill": Family(_DEEPSEEK, _DEEPSEEK[1:2], _DEEPSEEK[0], _THINK[:2]),
    "cohere": Family(
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
         "<|SYSTEM_TOKEN|>"),
        ("<|END_OF_TURN_TOKEN|>",),
        "<BOS_TOKEN>",
    ),
}  # fmt: skip
"""By the name of the template. The first of `ends` is the tokenizer's own."""


def template_of(name: str) -> str:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def served_with(name: str, folder: Path) -> Iterator[Served]:
    """The demo's policy with the template of this name; its files go to `folder`."""
    from transformers import AutoTokenizer

    family, model = FAMILIES[name], folder / "policy"
    shutil.copytree(POLICY, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    known = tokenizer.get_vocab()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [each for each in family.special if each not in known]}
    )
    tokenizer.add_tokens([each for each in family.plain if each not in known])
    tokenizer.eos_token = family.ends[0]
    tokenizer.save_pretrained(model)
    about = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**about, "bos_token": family.bos}))
    generation = json.loads((model / "generation_config.json").read_text())
    generation["eos_token_id"] = tokenizer.convert_tokens_to_ids(list(family.ends))
    (model / "generation_config.json").write_text(json.dumps(generation))
    (model / "chat_template.jinja").write_text(template_of(name))
    yield from rendering(model)


TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}


def said(content: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(arguments: Any, number: int = 1) -> dict[str, Any]:
    """`arguments` are JSON text, or an object."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "get_weather", "content": content}


OSLO: Final = '{"city": "Oslo"}'
SHAPES: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "answer": (said("Rain."),),
    "reasoning": (said("Rain.", reasoning_content="Oslo is wet."),),
    "`<think>` in the text": (said("<think>\nOslo is wet.\n</think>\n\nRain."),),
    "call": (said(None, call(OSLO)),),
    "text and call": (said("Let me look.", call(OSLO)),),
    "reasoning and call": (said("", call(OSLO), reasoning_content="Look first."),),
    "two calls": (said(None, call(OSLO), call('{"city": "Lima"}', 2)),),
    "call, result, answer": (said(None, call(OSLO)), result("rain"), said("Rain.")),
}
"""Replies, by what they have."""


def asked(*reply: dict[str, Any], history: tuple[dict[str, Any], ...] = ()) -> RoundTask:
    prompt = [*history, {"role": "user", "content": "How is the weather in Oslo?"}]
    uses_tools = any(each.get("tool_calls") for each in reply)
    return round_task("t", prompt=prompt, reply=reply, tools=(TOOL,) if uses_tools else ())


def recorded(served: Served, task: RoundTask, *, empty: bool = False) -> RecordedReply:
    return asyncio.run(served.chat().recorded_reply(task, empty_reasoning=empty))
