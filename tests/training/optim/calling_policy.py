"""The demo's policy as an agent with a tool: it cannot write calls, so a tool parser makes one of its first message.

The call's argument says whether the message has a box. Its text stays the message's content, and the template writes
both as they were, so that the next prompt continues the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question
from flywheel.records.round import RoundTask
from tests.factories.task import round_task
from tests.training.recorded.recordings import call, steps

TEMPLATE = (
    # The policy knows no words about tools: prompts without them differ, as they do with any template of tools.
    "{%- if not tools -%}{{- '\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' -}}"
    "{{- (message.content or '') + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
PARSER = """
import json

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("first-message")
class FirstMessage(ToolParser):
    def extract_tool_calls(self, model_output, request):
        if any(message["role"] == "tool" for message in request.messages):
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        arguments = json.dumps({"boxed": "boxed" in model_output})
        calls = [ToolCall(function=FunctionCall(name="look", arguments=arguments))]
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=model_output)
"""
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at the message.",
        "parameters": {"type": "object", "properties": {"boxed": {"type": "boolean"}}},
    },
}
RESULT = "What is 1 plus 1?"
"""Of words that the policy knows."""


def arguments(folder: Path) -> list[str]:
    """Write parser and template; the server's arguments with them."""
    (folder / "parser.py").write_text(PARSER)
    (folder / "template.jinja").write_text(TEMPLATE)
    return ["--chat-template", f"{folder}/template.jinja", "--tool-parser-plugin", f"{folder}/parser.py"]


def task(name: str, question: Question, recorded: Sequence[bool] = (True, False), **values: Any) -> RoundTask:
    """A task whose trace looked at messages with or without a box."""
    return round_task(
        name,
        question.text,
        reference=f"\\boxed{{{question.answer}}}",
        history=(),
        prompt=[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}],
        tools=(LOOK,),
        agent="recorded",
        steps=list(steps(*((call("look", {"boxed": boxed}), RESULT) for boxed in recorded))),
        **values,
    )
