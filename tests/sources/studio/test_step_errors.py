"""The steps that failed on the way to a reply: what clients of all generations say of them."""

from __future__ import annotations

import pytest

from tests.sources.studio.reading import by_id, read_all
from tests.sources.studio.writer import (
    DATA,
    NAMES,
    Studio,
    agent,
    chat,
    labels,
    message,
    part,
    tool,
)

ASKED = [message("system", part("s")), message("user", part("What is 1 + 1?"))]
FAILING = ("tool_failing_recovered", "tool_failing_gave_up", "tool_unknown_name")


def test_failed_steps_are_reported(studio: Studio) -> None:
    failed = {"content": [{"type": "text", "text": "no connection"}], "state": "error"}
    worded = {"content": [{"type": "text", "text": "Error: is a word"}], "state": "success"}
    studio.write(
        agent("a", ended=9),
        chat("c1", ASKED, "", parent="a", began=0.1, code=2, message="overloaded"),
        tool("t1", "1", "look", failed, parent="a", began=0.2),
        tool("t2", "2", "read", worded, parent="a", began=0.3),
        tool("t3", "3", "save", "ValueError: no such key", parent="a", began=0.4),
        tool("t4", "4", "stop", "done", parent="a", began=0.5, code=2, message="timed out"),
        tool("t5", "5", "look", "Errors: none", parent="a", began=0.6),
        chat("c2", ASKED, "2", parent="a", began=0.7),
    )
    replies, _, _ = read_all(studio.path)
    assert by_id(replies)["a"].errors == (
        "model: overloaded",
        "tool look: no connection",
        "tool save: ValueError: no such key",
        "tool stop: timed out",
    )


@pytest.mark.parametrize("name", NAMES)
def test_failing_tools_of_genuine_databases_are_reported(name: str) -> None:
    replies = by_id(read_all(DATA / f"{name}.sqlite")[0])
    failing = {label["span_id"] for label in labels(name) if label["kind"] in FAILING}
    with_tools = {label["span_id"] for label in labels(name) if label["tools"]}
    assert failing
    assert {span_id for span_id in with_tools if span_id in replies and replies[span_id].errors} == failing
