"""The choice of replies by their loss: the highest, without the top 1 %, which are set aside."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.records.round import SamplePool
from flywheel.records.selection import Candidate, SelectionRules
from flywheel.training.data.loss_selection import by_loss, read_selection, why_set_aside, write_selection

Strategy = Literal["loss_topk", "hybrid"]


def pool(count: int, size: int, strategy: Strategy = "loss_topk", **values: Any) -> SamplePool:
    """Candidates `t-0`, `t-1`, …; a third of them of one conversation."""
    made = {f"t-{n}": Candidate(n, "c" if n % 3 == 0 else f"c{n}") for n in range(count)}
    return SamplePool(size=size, strategy=strategy, candidates=made, rules=SelectionRules(4 * size, 1, **values))


def chosen(some: SamplePool, losses: dict[str, float], texts: dict[str, str] | None = None) -> dict[str, str]:
    said = texts or {task: f"question {task}" for task in losses}
    lines = by_loss(some, losses, said, dict.fromkeys(losses, 5), 1)
    assert [line["loss"] for line in lines] == sorted(losses.values(), reverse=True)
    return {line["task_id"]: line["outcome"] for line in lines}


def test_the_highest_losses_are_chosen_and_the_very_highest_set_aside() -> None:
    losses = {f"t-{n}": n / 100 for n in range(200)}
    outcomes = chosen(pool(200, 50), losses)
    assert [task for task, what in outcomes.items() if what == "set aside"] == ["t-199", "t-198"]
    assert {task for task, what in outcomes.items() if what == "chosen by loss"} == {
        f"t-{n}" for n in range(148, 198)
    }
    assert Counter(outcomes.values()) == {"set aside": 2, "chosen by loss": 50, "released": 148}


def test_a_small_pool_sets_one_aside_and_trains_on_the_rest() -> None:
    outcomes = chosen(pool(5, 9), {f"t-{n}": float(n) for n in range(5)})
    assert Counter(outcomes.values()) == {"set aside": 1, "chosen by loss": 4}


def test_a_hybrid_has_three_fifths_by_loss_and_the_rest_differs_from_them() -> None:
    losses = {f"t-{n}": n / 100 for n in range(100)}
    # What has a high loss is all about one thing; of the others, few are about something else.
    texts = {task: f"where is my order {task}" for task in losses} | {
        "t-3": "do you sell gift cards", "t-5": "the password is wrong", "t-7": "cancel everything now",
        "t-9": "opening hours please",
    }  # fmt: skip
    outcomes = chosen(pool(100, 10, "hybrid"), losses, texts)
    assert {task for task, what in outcomes.items() if what == "chosen by loss"} == {f"t-{n}" for n in range(93, 99)}
    assert {task for task, what in outcomes.items() if what == "chosen by diversity"} == {"t-3", "t-5", "t-7", "t-9"}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.sampled_from(["a", "b", "c d", "e f g", "早上好"])), min_size=1, max_size=50
    ),
    st.integers(1, 30),
    st.sampled_from(["loss_topk", "hybrid"]),
    st.sampled_from([{}, {"conversation": 0.2, "user": 1.0, "template": 1.0}]),
)
def test_a_choice_has_its_size_keeps_to_shares_and_repeats_no_text_while_others_are_left(
    found: list[tuple[float, str]], size: int, strategy: Strategy, shares: dict[str, float]
) -> None:
    some = pool(len(found), size, strategy, shares=shares, widen=False)
    losses = {f"t-{n}": loss for n, (loss, _) in enumerate(found)}
    texts = {f"t-{n}": text for n, (_, text) in enumerate(found)}
    outcomes = chosen(some, losses, texts)
    taken = [task for task, what in outcomes.items() if what.startswith("chosen")]
    aside = [task for task, what in outcomes.items() if what == "set aside"]
    assert len(aside) == math.ceil(len(found) / 100)
    if shares:
        own = [task for task in taken if some.candidates[task].conversation == "c"]
        assert len(own) <= max(1, 0.2 * len(taken))
    else:
        assert len(taken) == min(size, len(found) - len(aside))
        left = {texts[task] for task in outcomes if task not in aside}
        assert len({texts[task] for task in taken}) == min(len(taken), len(left))


@pytest.mark.parametrize("strategy", ["loss_topk", "hybrid"])
def test_quotas_hold_for_what_is_chosen(strategy: Strategy) -> None:
    made = {f"t-{n}": Candidate(n, structure="one_tool" if n % 4 else "no_tools") for n in range(80)}
    rules = SelectionRules(80, 1, weights={"one_tool": 1.0, "no_tools": 1.0})
    some = SamplePool(size=20, strategy=strategy, candidates=made, rules=rules)
    # The losses of one class are all higher.
    outcomes = chosen(some, {task: 1.0 + (each.structure == "one_tool") for task, each in made.items()})
    taken = Counter(made[task].structure for task, what in outcomes.items() if what.startswith("chosen"))
    assert taken["one_tool"] + taken["no_tools"] == 20
    assert abs(taken["one_tool"] - 10) <= (0 if strategy == "loss_topk" else 1)


def test_the_file_says_what_became_of_each_reply(tmp_path: Path) -> None:
    assert read_selection(tmp_path) == []
    lines = by_loss(pool(3, 1), {"t-0": 0.5, "t-1": 3.25, "t-2": 1.0}, dict.fromkeys(("t-0", "t-1", "t-2"), ""), {
        "t-0": 4, "t-1": 5, "t-2": 6
    }, 1)  # fmt: skip
    write_selection(tmp_path, lines)
    assert read_selection(tmp_path) == [
        {"task_id": "t-1", "loss": 3.25, "tokens": 5, "outcome": "set aside"},
        {"task_id": "t-2", "loss": 1.0, "tokens": 6, "outcome": "chosen by loss"},
        {"task_id": "t-0", "loss": 0.5, "tokens": 4, "outcome": "released"},
    ]
    assert why_set_aside(lines[0]).startswith("set aside: its loss of 3.25 nats a token is among the highest")
