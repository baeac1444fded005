"""The metrics of agents: their definitions by example, and what always holds."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import ConfigError
from flywheel.judge.agent_metrics import (
    METRICS,
    SHORT_NAMES,
    Attempt,
    measure,
    metric_names,
    plan_success_rate,
    step_efficiency,
    timing_precision,
    tool_selection_accuracy,
)
from flywheel.records.ground_truth import GroundTruth, ground_truth_of
from flywheel.records.tool_calls import Call, calls_in
from flywheel.records.trace import ChatMessage
from tests.cases import for_each
from tests.judge.rubric.steps import made

ROOT = Path(__file__).parents[2]
NAMES = st.lists(st.sampled_from("abcd"), max_size=6)
TEXT: ChatMessage = {"role": "assistant", "content": "I look it up."}
FULL = GroundTruth(("search", "read"), 2, "7", (*made("search", "{}", "x"), *made("read", "{}", "y")))


def calls(*names: str) -> list[Call]:
    """A name with a `!` is a call that failed."""
    return [Call(str(n), name.rstrip("!"), "{}", "x", name.endswith("!")) for n, name in enumerate(names)]


@for_each(
    ("called", "targets", "value"),
    [
        ("", "", 1),
        ("a", "", 0),
        ("", "a", 0),
        ("a", "a", 1),
        ("ba", "ab", 1),
        # Sets: a tool that is called twice is selected once.
        ("aab", "ab", 1),
        ("a", "ab", 2 / 3),
        ("abcd", "ab", 2 / 3),
        ("ac", "ab", 1 / 2),
        ("c", "ab", 0),
    ],
)
def test_tool_selection_is_the_f1_of_two_sets_of_names(called: str, targets: str, value: float) -> None:
    assert tool_selection_accuracy(called, targets) == pytest.approx(value)


@for_each(
    ("made_calls", "targets", "value"),
    [
        ((), "", 1),
        (("a",), "", 1),
        ((), "a", 0),
        (("a", "b"), "ab", 1),
        (("b", "a"), "ab", 0),
        (("a", "c", "b"), "ab", 1),
        (("a", "b!"), "ab", 0),
        (("a", "b!", "b"), "ab", 1),
        (("a!", "b"), "ab", 0),
        # An error of another call does not matter.
        (("a", "c!", "b"), "ab", 1),
        (("a",), "aa", 0),
        (("a", "a"), "aa", 1),
    ],
)
def test_a_plan_succeeds_if_the_targets_are_a_subsequence_without_error(
    made_calls: tuple[str, ...], targets: str, value: float
) -> None:
    assert plan_success_rate(calls(*made_calls), targets) == value


@for_each(
    ("own", "optimal", "successful", "value"),
    [
        (2, 2, True, 1),
        (4, 2, True, 0.5),
        (1, 2, True, 1),
        (0, 2, True, 1),
        (0, 0, True, 1),
        (3, 0, True, 0),
        (2, 2, False, 0),
        (0, 0, False, 0),
    ],
)
def test_efficiency_is_the_share_of_calls_that_were_needed(
    own: int, optimal: int, successful: bool, value: float
) -> None:
    assert step_efficiency(own, optimal, successful=successful) == value


CALL, OTHER = made("search", "{}", "x"), made("add", "{}", "3")
FINISH = made("generate_response", {"response": "7"}, "done")


@for_each(
    ("steps", "answer", "reference", "value"),
    [
        ((), "7", (), 1),
        ((), "7", CALL, 0),
        (CALL, "7", CALL, 1),
        # Which tool is called is not the question.
        (OTHER, "7", CALL, 1),
        (CALL, "7", (), 0),
        ((*CALL, *CALL), "7", CALL, 1 / 3),
        (CALL, "7", (*CALL, *CALL), 1 / 3),
        ((TEXT, *CALL), "7", (*CALL, *CALL), 2 / 3),
        # Neither an answer that ends the messages nor a finish function is another turn.
        ((*CALL, {"role": "assistant", "content": "7"}), "7", CALL, 1),
        ((*CALL, *FINISH), "7", CALL, 1),
        (CALL, "7", (*CALL, {"role": "assistant", "content": "8"}), 1),
        (CALL, "7", (*CALL, *FINISH), 1),
        # A reply that ends without an answer has no last turn.
        (CALL, "", CALL, 1 / 2),
        ((), "", (), 0),
        # Messages of others are not turns of the assistant.
        ((*CALL, {"role": "user", "content": "And?"}), "7", CALL, 1),
    ],
)
def test_timing_compares_turn_by_turn_whether_a_tool_is_called(
    steps: tuple[ChatMessage, ...], answer: str, reference: tuple[ChatMessage, ...], value: float
) -> None:
    assert timing_precision(steps, answer, reference) == pytest.approx(value)


def test_a_reply_is_measured_by_its_ground_truth() -> None:
    steps = (
        *made("search", "{}", "x"),
        *made("search", "{}", "x"),
        *made("read", "{}", "Error: gone", status="error"),
    )
    assert measure(Attempt(steps, "7", True), FULL) == {
        "tool_selection_accuracy": 1,
        "plan_success_rate": 0,
        "step_efficiency": pytest.approx(2 / 3),
        "timing_precision": 2 / 4,
        "end_to_end_success": 1,
    }
    # What the task lists as an error failed, though the message does not say so.
    right = (*made("search", "{}", "x"), *made("read", "{}", "y"))
    assert measure(Attempt(right, "7", True), FULL) == dict.fromkeys(METRICS, 1.0)
    assert measure(Attempt(right, "7", True, errors=["tool read: y"]), FULL)["plan_success_rate"] == 0


def test_without_ground_truth_nothing_is_measured_but_success() -> None:
    for accepted, value in ((True, 1.0), (False, 0.0), (None, None)):
        expected = {**dict.fromkeys(METRICS), "end_to_end_success": value}
        assert measure(Attempt(CALL, "7", accepted), GroundTruth()) == expected
    assert measure(Attempt((), "", None, failed=True), GroundTruth()) == {
        **dict.fromkeys(METRICS),
        "end_to_end_success": 0,
    }
    undecided = measure(Attempt(CALL, "7", None), FULL)
    assert [name for name, value in undecided.items() if value is None] == ["step_efficiency", "end_to_end_success"]
    assert measure(Attempt((), "7", True), GroundTruth((), 0, None, ())) == dict.fromkeys(METRICS, 1.0)


def test_a_failure_counts_0_even_where_nothing_was_to_be_done() -> None:
    for truth in (FULL, GroundTruth((), 0, None, ())):
        assert measure(Attempt(CALL, "7", None, failed=True), truth) == dict.fromkeys(METRICS, 0.0)


def test_a_finish_function_is_no_call_unless_it_is_a_target() -> None:
    steps = (*made("search", "{}", "x"), *FINISH)
    assert measure(Attempt(steps, "7", True), GroundTruth(("search",), 1, None, CALL)) == dict.fromkeys(METRICS, 1.0)
    named = measure(Attempt(steps, "7", True), GroundTruth(("search", "generate_response"), 2))
    assert (named["tool_selection_accuracy"], named["plan_success_rate"], named["step_efficiency"]) == (1, 1, 1)


@given(NAMES, NAMES)
def test_tool_selection_is_symmetric_and_does_not_depend_on_order_or_number(
    ours: list[str], theirs: list[str]
) -> None:
    value = tool_selection_accuracy(ours, theirs)
    assert 0 <= value <= 1
    assert value == tool_selection_accuracy(theirs, ours)
    assert value == tool_selection_accuracy(random.Random(1).sample(ours, len(ours)) * 2, theirs)
    assert (value == 1) is (set(ours) == set(theirs))
    assert (value == 0) is (set(ours) != set(theirs) and not set(ours) & set(theirs))


@given(NAMES, NAMES)
def test_a_plan_that_succeeds_does_so_with_further_calls_and_selects_every_target(
    ours: list[str], theirs: list[str]
) -> None:
    value = plan_success_rate(calls(*ours), theirs)
    assert value in (0, 1)
    assert plan_success_rate(calls(*theirs), theirs) == 1
    assert value <= plan_success_rate(calls("d", *ours, "a"), theirs)
    if value:
        assert set(theirs) <= set(ours)
        assert plan_success_rate(calls(*[f"{name}!" for name in ours]), theirs) == float(not theirs)


@given(st.integers(0, 50), st.integers(0, 50))
def test_efficiency_falls_with_every_call_beyond_the_optimum(own: int, optimal: int) -> None:
    value = step_efficiency(own, optimal, successful=True)
    assert 0 <= value <= 1
    assert (value == 1) is (own <= optimal)
    assert value >= step_efficiency(own + 1, optimal, successful=True)
    assert value <= step_efficiency(own, optimal + 1, successful=True)


TURNS = st.lists(st.sampled_from([CALL, OTHER, (TEXT,)]), max_size=5).map(lambda parts: sum(parts, ()))


@given(TURNS, TURNS, st.sampled_from(["7", ""]))
def test_timing_is_a_share_and_1_only_for_the_same_turns(
    ours: tuple[ChatMessage, ...], theirs: tuple[ChatMessage, ...], answer: str
) -> None:
    assert 0 <= timing_precision(ours, answer, theirs) <= 1
    assert timing_precision((*theirs, {"role": "assistant", "content": "7"}), "7", (*theirs, TEXT)) == 1


@given(NAMES, NAMES, st.integers(0, 5), st.sampled_from([True, False, None]), st.booleans())
def test_every_value_is_in_0_to_1_or_not_measured(
    called: list[str], targets: list[str], optimal: int, accepted: bool | None, failed: bool
) -> None:
    steps: tuple[ChatMessage, ...] = sum((made(name, "{}", "x") for name in called), ())
    for truth in (
        GroundTruth(tuple(targets), optimal, None, steps),
        GroundTruth(optimal_steps=optimal),
        GroundTruth(),
    ):
        values = measure(Attempt(steps, "7", accepted, failed), truth)
        assert list(values) == list(METRICS)
        assert all(value is None or 0 <= value <= 1 for value in values.values())
        assert not failed or not any(values.values())


def test_a_call_without_a_result_has_no_known_error() -> None:
    assert plan_success_rate(calls_in(made("a", "{}")), ["a"]) == 1
    assert plan_success_rate(calls_in(made("a", "{}"), ["tool a: TimeoutError"]), ["a"]) == 0


def test_sages_short_names_are_metrics() -> None:
    assert metric_names([*SHORT_NAMES, *METRICS]) == tuple(METRICS)
    assert metric_names(["timing", "planning", "plan_success"]) == ("timing_precision", "plan_success_rate")
    assert metric_names(["timing", "polite"], criteria={"polite"}) == ("timing_precision", "polite")


def test_a_criterion_with_the_name_of_a_metric_does_not_take_its_place() -> None:
    clashing = {"timing", "step_efficiency", "score"}
    assert metric_names(["timing", "step_efficiency"], clashing) == ("timing_precision", "step_efficiency")
    own = tuple(f"criterion:{name}" for name in sorted(clashing))
    assert metric_names(own, clashing) == own
    with pytest.raises(ConfigError, match="cannot measure criterion:polite: there is no such metric"):
        metric_names(["criterion:polite"], {"polite"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("retrieval", "cannot measure retrieval: it is SAGE's metric of searching a catalogue of tools"),
        ("step_eficiency", "cannot measure step_eficiency: there is no such metric. Did you mean step_efficiency?"),
        ("polite", "cannot measure polite: there is no such metric. There are: tool_selection_accuracy, "),
    ],
)
def test_other_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        metric_names(["timing", name])
    assert str(caught.value).startswith(said)


def test_the_page_has_every_metric_and_every_name_of_sage() -> None:
    page = (ROOT / "docs" / "reference" / "rubrics-and-filters.md").read_text()
    definitions, names = page.split("\n### Definitions\n")[1], page.split("\n### SAGE's names\n")[1]
    assert re.findall(r"^\| `(\w+)` \|", definitions.split("\n### ")[0], re.M) == list(METRICS)
    rows = re.findall(r"^\| (`.+`) \| `(\w+)` \|$", names, re.M)
    assert {short: full for shorts, full in rows for short in re.findall(r"\w+", shorts)} == dict(SHORT_NAMES)


def test_the_page_s_example_is_ground_truth() -> None:
    page = (ROOT / "docs" / "reference" / "rubrics-and-filters.md").read_text()
    truth = ground_truth_of(json.loads(page.split("```json\n")[1].split("```")[0]))
    assert (truth.target_tools, truth.optimal_steps, truth.answer) == (("search", "read"), 2, "7 °C")
    assert measure(Attempt(made("search", "{}", "x"), "7 °C", True), truth)["timing_precision"] == 1
