"""The worked example of `docs/train/recorded-tools.md` is what happens."""

from __future__ import annotations

import re
from pathlib import Path

from flywheel.records.states import Split
from flywheel.training.data.rollout import CallOutcome
from flywheel.training.recorded.recorded_rollout import RecordedTools
from flywheel.training.recorded.recordings import results_of
from tests.training.recorded.recordings import ADD, call, recording, shared_recordings, tool

PAGE = (Path(__file__).parents[3] / "docs" / "train" / "recorded-tools.md").read_text()
ROW = re.compile(r"^\| `(?P<name>\w+)\((?P<arguments>\{[^`]*?)\)?`(?: again)? \| (?P<answer>.*?) \| .* \|$", re.M)
PRICE = tool("stock_price", "The price.", symbol={"type": "string"}, currency={"type": "string", "default": "USD"})
TRACE = recording(
    (call("add", {"a": 17, "b": 25}), "42"), (call("stock_price", {"symbol": "ACME"}), "40.10"), tools=(ADD, PRICE)
)


def test_each_call_of_the_example_is_answered_as_the_page_says() -> None:
    section = PAGE.partition("## Recorded results")[2].partition("## Misses")[0]
    rows = list(ROW.finditer(section))
    assert len(rows) == 7
    tools = RecordedTools(TRACE.tools, results_of(TRACE))
    others = [recording((call("add", {"a": 25, "b": 17}), "42"), conversation=name, tools=(ADD,)) for name in "xy"]
    sharing = RecordedTools(TRACE.tools, results_of(TRACE), shared=shared_recordings(others, Split.TRAIN))
    for row in rows:
        made = [call(row["name"], row["arguments"])]
        (found,) = tools.answer(made).calls
        expected = row["answer"].strip("`")
        if expected.startswith("none"):
            assert found.outcome is CallOutcome.MISS, row[0]
        else:
            assert found.result is not None, row[0]
            assert found.result.content.startswith(expected.partition(": …")[0]), row[0]
        if "two other conversations" in expected:
            (shared,) = sharing.answer(made).calls
            assert (shared.outcome, shared.result and shared.result.content) == (CallOutcome.SHARED, "42")
