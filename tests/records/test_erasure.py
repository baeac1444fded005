"""What is left of JSON without erased tasks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.erasure import ERASED, REMOVED, without, without_tasks
from flywheel.records.round import Probe, Recording
from tests.factories.erasure import GONE_HELD_OUT, STAYS_HELD_OUT, put_probe

KEYS = frozenset({"a", "b"})
names = st.sampled_from(["a", "b", "c", "d"])
# Records are in any structure; each has its task's text and no other.
records = names.flatmap(
    lambda name: st.fixed_dictionaries(
        {"task_id": st.just(name)},
        optional={"answer": st.just(f"text of {name}"), "ids": st.lists(st.integers()), "error": st.just(name)},
    )
)
by_task = st.dictionaries(names, st.integers()).map(lambda each: {name: f"text of {name}" for name in each})
values = st.recursive(
    st.one_of(st.none(), st.integers(), st.just("of nobody"), st.lists(st.integers()), records),
    lambda inner: st.one_of(
        st.lists(inner),
        st.dictionaries(st.sampled_from(["train", "scores", "x"]), inner),
        st.fixed_dictionaries({"left_out": by_task, "released": st.lists(names), "inner": inner}),
    ),
    max_leaves=20,
)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *leaves(item))]
    return [value]


@given(values)
def test_nothing_of_an_erased_task_is_left_and_nothing_else_is_lost(value: Any) -> None:
    before = copy.deepcopy(value)
    left = without(value, KEYS)
    assert value == before, "it was changed in place"
    kept = [] if left is REMOVED else leaves(left)
    assert not {"a", "b", "text of a", "text of b"} & set(map(str, kept))
    for mark in ("c", "d", "text of c", "text of d", "of nobody"):
        assert kept.count(mark) == leaves(value).count(mark)
    assert (left is value) == (not {"a", "b"} & set(map(str, leaves(value))))
    assert left is REMOVED or without(left, KEYS) is left


@pytest.mark.parametrize("name", ["task_id", "chosen_task_id", "rejected_task_id", "reply_task_id"])
def test_a_record_of_several_tasks_is_one_of_each(name: str) -> None:
    assert without([{"task_id": "c", name: "a"}, {"task_id": "c"}], KEYS) == [{"task_id": "c"}]


def test_a_text_that_is_the_key_of_a_task_is_no_reference_to_it() -> None:
    """Keys of tasks of files are what their users chose."""
    value = {"train": [{"task_id": "c", "answer": "a"}], "model": "a", "a": {"b": 1}, "left_out": {"c": "a"}}
    assert without(value, KEYS) is value


def test_errors_of_what_used_a_task_are_replaced_and_reasons_of_the_gate_are_not() -> None:
    why = "ValueError: 12 Gråbrødretorv is no number"
    for field in ("error", "reason", "refusal", "paused"):
        value = {"stages": [{field: why, "steps": 3}], "task": {"task_id": "c", field: why}}
        assert without(value, KEYS) is value, "that has not used it"
        assert without(value, KEYS, ()) == {"stages": [{field: ERASED, "steps": 3}], "task": value["task"]}
        assert without(empty := {field: ""}, KEYS, ()) is empty
    decision = {"outcome": "rejected", "reason": "the gain of 0.05 is not shown", "gain": 0.05}
    assert without(decision, KEYS, ()) is decision
    assert without(failed := decision | {"outcome": "failed"}, KEYS, ()) == failed | {"reason": ERASED}
    refused = {"outcome": "rejected", "reason": why}
    assert without(refused, KEYS, ()) == refused | {"reason": ERASED}


def test_system_prompts_are_those_of_rollouts_that_are_left() -> None:
    value = {"sampling": {"system_prompts": [{"text": "x", "rollouts": 2}, {"text": "y", "rollouts": 3}]}}
    assert without(value, KEYS) is value
    assert without(value, KEYS, {"y"}) == {"sampling": {"system_prompts": [{"text": "y", "rollouts": 3}]}}
    assert without({"system_prompts": {"x": 2, "y": 3}}, KEYS, {"y"}) == {"system_prompts": {"y": 3}}
    assert without({"task_id": "c", "system_prompts": ["x"]}, KEYS, {"y"}) == {
        "task_id": "c",
        "system_prompts": ["x"],
    }


def test_a_probe_keeps_the_texts_of_other_tasks_with_their_figures() -> None:
    probe = put_probe()
    assert without_tasks(probe, {"t-other"}) is probe
    left = without_tasks(probe, {GONE_HELD_OUT})
    assert left is not None
    assert (left.texts, left.tasks) == (probe.texts[1:], [STAYS_HELD_OUT])
    for at, (text, place) in enumerate(left.places):
        assert probe.places[2 * at + 1] == (text + 1, place)
        assert left.first.adapter[at] == probe.first.adapter[2 * at + 1]
    assert without_tasks(probe, {GONE_HELD_OUT, STAYS_HELD_OUT}) is None


def test_a_probe_that_does_not_say_whose_its_texts_are_is_removed() -> None:
    unknown = put_probe().model_copy(update={"tasks": []})
    assert without_tasks(unknown, {"t-other"}) is None
    assert without_tasks(put_probe().model_copy(update={"tasks": ["t-other"]}), {"t-another"}) is None
    assert without({"probe": unknown.model_dump(mode="json")}, KEYS) == {"probe": None}
    assert without({"probe": {"texts": [[1, 2]], "shape": "of another version"}}, KEYS) == {"probe": None}
    none: dict[str, Any] = {"probe": None}
    assert without(none, KEYS) is none


def test_the_figures_of_a_parent_stay_beside_the_others() -> None:
    recording = Recording(adapter=[1.0, 2.0], base=[3.0, 4.0], parent=[5.0, 6.0])
    probe = Probe(
        texts=[[1, 2], [3, 4]], tasks=["a", "c"], places=[(0, 1), (1, 1)], first=recording, second=recording
    )
    left = without_tasks(probe, KEYS)
    assert left is not None
    assert left.second == Recording(adapter=[2.0], base=[4.0], parent=[6.0])
    assert left.places == [(0, 1)]
