"""Messages of the policy that repeat something until their limit of tokens cuts them off."""

from __future__ import annotations

from collections.abc import Iterable

from flywheel.judge.rubric.checks.degenerate import find_loop
from flywheel.records.trace import get_path
from flywheel.training.data.rollout import text_of
from flywheel.training.data.samples import CallTokens


def cut_loop(calls: Iterable[CallTokens]) -> str:
    """What the first message repeats that loops and was cut off at its limit of tokens; empty if none does. Its
    reasoning and the arguments of its calls count as well."""
    for call in calls:
        if call.finish_reason != "length":
            continue
        tools = [get_path(each, "function", "arguments") for each in call.answer.get("tool_calls") or ()]
        texts = [call.answer.get(name) for name in ("reasoning", "reasoning_content", "content")] + tools
        if found := next(filter(None, map(find_loop, map(text_of, texts))), ""):
            return found
    return ""
