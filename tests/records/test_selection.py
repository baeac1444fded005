"""What a round takes: shares, quotas of classes, and tasks of earlier rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.selection import (
    LATER,
    OVER,
    SHARES,
    UNWEIGHTED,
    Candidate,
    ClassCount,
    Selection,
    SelectionRules,
    TaskClass,
    quotas,
    select,
)
from flywheel.records.task import class_of
from tests.factories.trace import reply
from tests.training.recorded.recordings import call, steps

UNSHARED = {"conversation": 1.0, "user": 1.0, "template": 1.0}
INFLUENCE = {"conversation": 0.05, "user": 0.20, "template": 1.0}
SAGE = {"one_tool": 0.35, "several_tools": 0.30, "no_tools": 0.20, "several_turns": 0.15}


def rules(most: int, needed: int = 1, **values: Any) -> SelectionRules:
    return SelectionRules(most, needed, **values)


def candidates(*keys: str) -> list[Candidate]:
    return [Candidate(number, key) for number, key in enumerate(keys)]


def within(found: Sequence[Candidate], shares: Mapping[str, float], most: int) -> Sequence[int]:
    return select(found, rules(most, shares=shares, widen=False)).tasks


def test_what_is_above_its_share_waits_and_the_first_go_first() -> None:
    many = candidates(*"aaaaaaaaaa", *"bcdefghijklmnopqrst")
    taken = within(many, UNSHARED | {"conversation": 0.1}, 20)
    assert len(taken) == 20
    assert taken[:2] == [0, 1]
    assert sum(number < 10 for number in taken) <= 2


def test_a_round_that_shares_make_smaller_has_smaller_shares() -> None:
    # 10 of one and 10 others: two of the first would be a sixth of twelve.
    taken = within(candidates(*"aaaaaaaaaa", *"bcdefghijk"), UNSHARED | {"conversation": 0.1}, 20)
    assert sum(number < 10 for number in taken) == 1
    assert len(taken) == 11


def test_one_of_each_is_always_allowed_and_nothing_is_limited_without_limits() -> None:
    tight = UNSHARED | {"conversation": 0.01}
    assert within(candidates(*"aabbcc"), tight, 6) == [0, 2, 4]
    for free in (UNSHARED, {}):
        assert within(candidates(*"aaaaaa"), free, 4) == [0, 1, 2, 3]
    assert within([], tight, 10) == []


def test_what_is_not_known_is_not_limited() -> None:
    unknown = [Candidate(number, f"c{number}") for number in range(20)]
    assert len(within(unknown, INFLUENCE, 20)) == 20


def of_users(*pairs: str) -> list[Candidate]:
    """Candidates from `conversation user` and their numbers; `-` is a user who is not known."""
    return [
        Candidate(number, conversation, "" if user == "-" else user)
        for number, (conversation, user) in enumerate(pair.split() for pair in pairs)
    ]


def test_a_share_that_what_is_there_cannot_meet_is_widened_to_what_can() -> None:
    one = candidates(*"a" * 30)
    chosen = select(one, rules(20, 10, shares=INFLUENCE))
    assert chosen == Selection(list(range(20)), [], {"conversation": 1.0}, {LATER: 10})
    three = candidates(*"aaaaaaaaaaaaaaaaaaaaaaaa", *"bbbb", *"cccc")
    chosen = select(three, rules(12, 12, shares=INFLUENCE))
    assert (len(chosen.tasks), chosen.widened) == (12, {"conversation": 4 / 12})
    few = of_users(*(f"c{n} {'anna' if n % 2 else 'ben'}" for n in range(40)))
    chosen = select(few, rules(20, 20, shares=INFLUENCE))
    assert (len(chosen.tasks), chosen.widened) == (20, {"user": 0.5})
    kind = [Candidate(n, f"c{n}", "", 7) for n in range(40)]
    assert select(kind, rules(20, 20, shares=INFLUENCE)).widened == {}
    chosen = select(kind, rules(20, 20, shares=INFLUENCE | {"template": 0.2}))
    assert (chosen.tasks, chosen.widened) == (list(range(20)), {"template": 1.0})


def test_fewer_than_a_round_needs_can_all_be_taken() -> None:
    assert select(candidates(*"aaaaaaa"), rules(20, 10, shares=INFLUENCE)).tasks == list(range(7))
    assert select([], rules(20, 10, shares=INFLUENCE)) == Selection([], [])


def test_a_share_that_can_be_met_is_not_widened() -> None:
    many = candidates(*"aaaaaaaaaa", *"bcdefghijklmnopqrst")
    shares = INFLUENCE | {"conversation": 0.1}
    for most, needed in ((20, 20), (29, 19)):  # a smaller round can meet it, and suffices
        chosen = select(many, rules(most, needed, shares=shares))
        assert (chosen.tasks, chosen.widened) == (within(many, shares, most), {})


def test_nothing_is_widened_where_the_rules_say_so() -> None:
    chosen = select(candidates(*"a" * 30), rules(20, 10, shares=INFLUENCE, widen=False))
    assert chosen == Selection([0], [], {}, {OVER: 29})


def test_shares_that_can_be_met_one_by_one_and_not_together_are_widened() -> None:
    # Half of one user in many conversations, half of one conversation of other users.
    mixed = of_users(*(f"c{n} anna" for n in range(10)), *(f"shared u{n}" for n in range(10)))
    chosen = select(mixed, rules(20, 16, shares=UNSHARED | {"conversation": 0.5, "user": 0.1}))
    assert len(chosen.tasks) >= 16
    assert set(chosen.widened) <= {"conversation", "user"}
    assert chosen.widened["user"] >= 0.3


def of_classes(**counts: int) -> list[Candidate]:
    return [
        Candidate(n, structure=name) for n, name in enumerate(name for name in counts for _ in range(counts[name]))
    ]


def test_quotas_are_met_on_a_skewed_supply() -> None:
    """Nine tenths of what agents answer calls no tool."""
    found = of_classes(no_tools=9000, one_tool=600, several_tools=300, several_turns=100)
    chosen = select(found, rules(400, weights=SAGE))
    assert {name: (count.wanted, count.chosen) for name, count in chosen.classes.items()} == {
        "one_tool": (140, 140), "several_tools": (120, 120), "no_tools": (80, 80), "several_turns": (60, 60),
    }  # fmt: skip
    assert chosen.left_out == {LATER: 9600}
    assert chosen.tasks == sorted(set(chosen.tasks))


@pytest.mark.slow
def test_a_class_with_too_few_gives_all_it_has_and_the_others_are_scaled() -> None:
    found = of_classes(no_tools=9000, one_tool=600, several_tools=30, several_turns=100)
    chosen = select(found, rules(400, weights=SAGE))
    # 370 of the three others in the proportion 35 : 20 : 15, of which 79 several turns are there.
    assert chosen.classes == {
        "one_tool": ClassCount(140, 600, 185), "several_tools": ClassCount(120, 30, 30),
        "no_tools": ClassCount(80, 9000, 106), "several_turns": ClassCount(60, 100, 79),
    }  # fmt: skip


def test_classes_without_a_weight_are_left_out_and_counted() -> None:
    found = of_classes(no_tools=5, one_tool=3, several_tools=2)
    chosen = select(found, rules(9, weights={"one_tool": 1.0, "several_tools": 1.0, "no_tools": 0.0}))
    assert (chosen.tasks, chosen.left_out) == ([5, 6, 7, 8, 9], {UNWEIGHTED: 5})


def test_replayed_tasks_are_a_share_of_the_new_ones() -> None:
    earlier = [Candidate(number) for number in range(100, 120)]
    chosen = select(candidates(*"abcdefghij"), rules(100, replay=0.3), earlier)
    assert (len(chosen.tasks), chosen.replayed) == (10, [100, 101, 102])
    # Of a round with room for 10, they are a part.
    chosen = select(candidates(*"abcdefghij"), rules(10, replay=0.3), earlier)
    assert (len(chosen.tasks), len(chosen.replayed)) == (8, 2)
    assert select([], rules(10, replay=0.3), earlier).replayed == []


def test_replayed_tasks_count_towards_shares() -> None:
    earlier = [Candidate(100 + n, "a" if n < 9 else f"e{n}") for n in range(12)]
    found = candidates(*"abcdefghijklmnopqrst")
    shares = UNSHARED | {"conversation": 0.05}
    chosen = select(found, rules(100, shares=shares, replay=0.3), earlier)
    assert chosen.replayed == [109, 110, 111], "a has its share"


SHARE = st.floats(0.01, 1.0)
FOUND = st.lists(
    st.builds(
        lambda c, u, t, structure: Candidate(0, f"c{c}", f"u{u}" if u else "", t, structure),
        st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.sampled_from(list(TaskClass)),
    ),
    max_size=60,
)  # fmt: skip
WEIGHTS = st.one_of(
    st.just({}), st.dictionaries(st.sampled_from(list(TaskClass)), st.sampled_from([0.5, 1.0, 3.0]), min_size=1)
)
RULES = st.builds(
    SelectionRules,
    st.integers(1, 80),
    st.integers(1, 80),
    st.fixed_dictionaries(dict.fromkeys(SHARES, SHARE)) | st.just({}),
    st.booleans(),
    WEIGHTS,
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
)


def numbered(found: Sequence[Candidate], first: int = 0) -> list[Candidate]:
    return [replace(each, task=first + number) for number, each in enumerate(found)]


@given(FOUND, RULES, FOUND)
def test_a_choice_keeps_to_its_rules_whatever_is_there(
    found: list[Candidate], given_rules: SelectionRules, earlier: list[Candidate]
) -> None:
    free, earlier = numbered(found), numbered(earlier, 1000)
    chosen = select(free, given_rules, earlier)
    assert chosen == select(list(free), given_rules, list(earlier)), "the same from the same"
    taken = [*chosen.tasks, *chosen.replayed]
    assert len(set(taken)) == len(taken) <= given_rules.most
    assert set(chosen.tasks) <= set(range(1000)) and min(chosen.replayed, default=1000) >= 1000
    weights = given_rules.weights
    usable = [each for each in free if not weights or weights.get(TaskClass(each.structure))]
    if given_rules.widen or not given_rules.shares:
        most = given_rules.most if not given_rules.replay else 1
        assert len(chosen.tasks) >= min(given_rules.needed, most, len(usable))
    by_task = {each.task: each for each in (*free, *earlier)}
    for some in (chosen.tasks, taken):
        for name, share in {**given_rules.shares, **chosen.widened}.items():
            counted = Counter(key for task in some if (key := getattr(by_task[task], name)))
            assert all(n <= max(1, share * len(some) + 1e-6) for n in counted.values())
    assert len(chosen.tasks) + sum(chosen.left_out.values()) == len(free)
    if not given_rules.shares:
        exact = min(int(given_rules.replay * len(chosen.tasks) + 1e-9), len(earlier))
        # A round with room for one task takes a new one.
        assert len(chosen.replayed) == exact or (len(chosen.tasks), given_rules.most) in ((1, 1), (1, 2))
    else:
        assert len(chosen.replayed) <= given_rules.replay * len(chosen.tasks) + 1e-6


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 1), min_size=1),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3000)),
    st.integers(0, 1000),
)
def test_quotas_fill_the_size_and_are_within_two_points_where_the_supply_suffices(
    weights: dict[str, float], supply: dict[str, int], size: int
) -> None:
    counts = quotas(weights, supply, size)
    there = {name: supply.get(name, 0) for name in weights}
    assert counts.keys() == weights.keys()
    assert sum(counts.values()) == min(size, sum(there.values()))
    assert all(0 <= counts[name] <= there[name] for name in weights)
    whole = sum(weights.values())
    if all(there[name] >= size * weight / whole for name, weight in weights.items()):
        # Whole numbers differ by less than one, which is 2 points of fifty.
        assert all(
            abs(counts[name] - size * weight / whole) <= max(1, 0.02 * size) for name, weight in weights.items()
        )
    full = [counts[name] / weights[name] for name in weights if counts[name] < there[name]]
    assert not full or all(abs(a - b) * min(weights.values()) <= 1 + 1e-6 for a in full for b in full)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, TaskClass.NO_TOOLS),
        ({"trajectory": steps((call(), "3"))}, TaskClass.ONE_TOOL),
        ({"trajectory": steps((call(), "3"), (call(arguments={"a": 2}), "4"))}, TaskClass.ONE_TOOL),
        ({"trajectory": steps((call(), "3"), (call(name="mul"), "4"))}, TaskClass.SEVERAL_TOOLS),
        ({"trajectory": steps((call(name="generate_response"), "done"))}, TaskClass.NO_TOOLS),
        ({"trajectory": steps((call(), "3")), "turn": 1}, TaskClass.SEVERAL_TURNS),
        ({"history": ({"role": "system", "content": "Be kind."},)}, TaskClass.NO_TOOLS),
        (
            {"history": ({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."})},
            TaskClass.SEVERAL_TURNS,
        ),
    ],
)
def test_the_class_of_a_task_follows_from_its_turns_and_calls(values: dict[str, Any], expected: TaskClass) -> None:
    assert class_of(reply(1, **values)) is expected
