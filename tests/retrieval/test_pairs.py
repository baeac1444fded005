"""Pairs of conversations and tools from tasks, what training may see of them, and hard negatives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tool_calls import DATA_SETS, replies
from flywheel.records.states import Split
from flywheel.records.task import task_line
from flywheel.records.trace import Reply
from flywheel.retrieval.pairs import TRAINED_TOOLS, Calls, trained_tools, training_rows
from tests.factories.trace import reply

Json = dict[str, Any]


def tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "description": f"About {name}"}}


def called(*made: tuple[str, str]) -> tuple[Json, ...]:
    """An answer with these calls, and a result for each that is not empty."""
    calls = [
        {"id": f"{name}{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, (name, _) in enumerate(made)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, (_, text) in zip(calls, made, strict=True)
        if text
    ]
    return ({"role": "assistant", "content": "", "tool_calls": calls}, *results)


def with_calls(*told: Reply, split: Split = Split.TRAIN) -> Calls:
    calls = Calls()
    for one in told:
        calls.add(task_line(one, "/studio"), split)
    return calls


OFFERED = tuple(map(tool, ("book_flight", "book_hotel", "pay_bill", "get_weather", "generate_response")))


def test_a_pair_is_the_conversation_before_a_call_with_a_result() -> None:
    said = {"role": "assistant", "content": "It is sunny."}
    steps = (*called(("get_weather", "sunny")), said, *called(("book_flight", "done")))
    steps[-2]["content"] = "I book it."
    [first, second] = with_calls(reply(1, trajectory=steps, tools=OFFERED, query="Fly if sunny")).pairs[Split.TRAIN]
    assert (first.tool, first.query, first.conversation) == ("get_weather", ("Fly if sunny",), "conversation-1")
    assert (second.tool, second.query) == ("book_flight", ("It is sunny.", "Fly if sunny"))
    assert first.offered == {"book_flight", "book_hotel", "pay_bill", "get_weather"}


@pytest.mark.parametrize(
    ("steps", "more"),
    [
        (called(("book_flight", "Error: no seat")), {}),
        (called(("book_flight", "")), {}),
        (called(("book_flight", "late")), {"errors": ("tool book_flight: late",)}),
        (called(("unknown", "done")), {}),
        (called(("generate_response", "done")), {}),
        ((), {}),
    ],
)
def test_other_calls_are_no_pairs(steps: tuple[Json, ...], more: Json) -> None:
    calls = with_calls(reply(1, trajectory=steps, tools=OFFERED, **more))
    assert calls.pairs == {Split.TRAIN: [], Split.HELD_OUT: []}
    assert "generate_response" not in calls.tools


def test_calls_of_one_step_are_beside_each_other() -> None:
    steps = called(("book_flight", "done"), ("book_hotel", "done"), ("pay_bill", "Error: no"), ("book_hotel", "done"))
    pairs = with_calls(reply(1, trajectory=steps, tools=OFFERED)).pairs[Split.TRAIN]
    assert [(pair.tool, pair.beside) for pair in pairs] == [
        ("book_flight", {"book_hotel"}),
        ("book_hotel", {"book_flight"}),
    ]
    assert len({pair.id for pair in pairs}) == 2


def test_negatives_are_offered_or_have_near_names_and_are_called_nowhere_in_the_conversation() -> None:
    near = tuple(map(tool, ("book_car", "book_flight_ticket", "bake_cake")))
    history = (*called(("book_hotel", "Error: full")), {"role": "user", "content": "Then fly"})
    told = reply(1, trajectory=called(("book_flight", "done")), tools=OFFERED, history=history)
    later = reply(
        2, trajectory=called(("pay_bill", "Error: no")), tools=(*OFFERED, *near), conversation_id="conversation-1"
    )
    calls = with_calls(told, later)
    texts = {text: name for name, text in calls.tools.items()}
    [row] = training_rows(calls, frozenset(calls.tools), 3, 1)
    assert row["anchor"].startswith("What is 1 plus 1?\nThen fly")
    assert texts[row["positive"]] == "book_flight"
    # Of those that were offered only the weather was not called; then come the nearest names.
    assert [texts[row[f"negative_{place}"]] for place in (1, 2, 3)] == [
        "get_weather",
        "book_flight_ticket",
        "book_car",
    ]
    assert training_rows(calls, frozenset({"pay_bill"}), 3, 1) == []
    [narrow] = training_rows(calls, frozenset({"book_flight", "book_car"}), 3, 1)
    assert set(narrow) == {"anchor", "positive", "negative_1"}


@settings(max_examples=20)
@given(st.sampled_from(DATA_SETS), st.integers(0, 1000), st.integers(0, 6))
def test_training_sees_no_unseen_tool_and_no_held_out_conversation(data_set: Any, seed: int, negatives: int) -> None:
    calls = Calls()
    for number, told in enumerate(replies(data_set, 12, seed)):
        calls.add(task_line(told, "/made"), Split.HELD_OUT if number % 3 == 0 else Split.TRAIN)
    trained = trained_tools(calls.tools, seed)
    rows = training_rows(calls, trained, negatives, seed)
    seen = {calls.tools[name] for name in trained}
    assert all(text in seen for row in rows for column, text in row.items() if column != "anchor")
    assert len(rows) == sum(pair.tool in trained for pair in calls.pairs[Split.TRAIN])
    for row in rows:
        distinct = [text for column, text in row.items() if column != "anchor"]
        assert len(distinct) == len(set(distinct)) == 1 + negatives
    assert rows == training_rows(calls, trained, negatives, seed)


def test_the_split_of_tools_does_not_change_when_tools_are_added() -> None:
    names = [f"tool_{number}" for number in range(2000)]
    some, every = trained_tools(names[:1000], 7), trained_tools(names, 7)
    assert some == every & set(names[:1000])
    assert abs(len(every) / 2000 - TRAINED_TOOLS) < 0.05
    assert every != trained_tools(names, 8)
