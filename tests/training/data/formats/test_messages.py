"""Messages as templates take them, whatever another program wrote for a tool call."""

from __future__ import annotations

from typing import Any

import pytest

from flywheel.records.task import task_line
from flywheel.training.data.chat_messages import LeftOut, messages
from flywheel.training.data.export_formats import FORMATS, FormatName
from tests.factories.trace import reply
from tests.training.data.formats.conftest import Exported
from tests.training.data.formats.filling import bad, exported, good, lines

FLAT = [{"name": "f", "arguments": {"a": 1}}]
ODD: dict[str, Any] = {
    "a text": "weird",
    "numbers": [3],
    "one call": {"function": {"name": "f"}},
    "a function that is a text": [{"function": "f"}],
    "no name": [{"id": "1", "function": {"arguments": "{}"}}],
}
TEXTS = (FormatName.AGENTJET,)


def said(calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_a_flat_call_becomes_one_with_a_function() -> None:
    [made] = messages([said(FLAT)])
    assert made["tool_calls"] == [{"id": "", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


def test_ids_and_names_are_texts() -> None:
    [call, result] = messages([said([{"id": 7, **FLAT[0]}]), {"role": "tool", "tool_call_id": 7, "content": "x"}])
    assert (call["tool_calls"][0]["id"], result["tool_call_id"]) == ("7", "7")


@pytest.mark.parametrize("calls", ODD.values(), ids=ODD)
@pytest.mark.parametrize("where", ["history", "trajectory"])
@pytest.mark.parametrize(
    "name",
    [each for each in FormatName if each not in TEXTS and not FORMATS[each].paired and not FORMATS[each].is_table],
)
def test_a_call_of_another_shape_is_left_out(name: FormatName, where: str, calls: Any) -> None:
    told = reply(1, **{where: (said(calls),)})
    sample = exported(task_line(told, "/a", "t"))
    if where == "trajectory" and name in (FormatName.TRL_GRPO, FormatName.VERL):
        assert FORMATS[name].record(sample)
        return
    with pytest.raises(LeftOut, match="names no function"):
        FORMATS[name].record(sample)


@pytest.mark.parametrize("name", [FormatName.TRL_SFT, FormatName.TRINITY])
def test_a_reply_with_a_call_that_is_no_target_is_left_out(name: FormatName) -> None:
    told = task_line(reply(1, trajectory=({**said(FLAT), "weight": 0},)), "/a", "t")
    with pytest.raises(LeftOut, match="not to be trained on"):
        FORMATS[name].record(exported(told))


@pytest.mark.parametrize("name", [each for each in FormatName if FORMATS[each].suffix == "jsonl"])
def test_tasks_with_odd_calls_leave_the_others_in(exported: Exported, name: FormatName) -> None:
    odd = [good(reply(n, history=(said(calls),))) for n, calls in enumerate(ODD.values())]
    path = exported(name.value, [*odd, good(reply(20, query="Q?", answer="x")), bad(reply(20 + 1, query="Q?"))])
    assert len(lines(path)) == (len(odd) + 1 if name in TEXTS else 1)
