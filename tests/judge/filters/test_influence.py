"""Influence: what counts as one template, and shares of a round."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.judge.filters.deduplication import particulars, template
from flywheel.judge.filters.influence import Choice, Influence, WeighedSample, choose, weigh, within_shares
from flywheel.records.task import task_line
from tests.factories.trace import START, reply

FREE = Influence(conversation=1, user=1, template=1)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("What is 90% of 160?", "what is 5% of 1,000"),
        ("A train goes 82 km/h.", "A train goes 7 km/h."),
        ('Translate "good morning" to French', 'Translate "I am lost, help" to French'),
        ("把“早上好”翻译成法语", "把“谢谢你”翻译成法语"),
        ("Where was Ada Lovelace born?", "Where was Alan Turing born?"),
        ("What does `f(x)` do?", "What does `import os` do?"),
        ("Open https://a.example/x now", "Open http://b.example/y/z now"),
    ],
)
def test_numbers_names_and_quoted_parts_do_not_make_another_template(a: str, b: str) -> None:
    assert template(a) == template(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("What is 90% of 160?", "What is 90% more than 160?"),
        ("Where was Ada Lovelace born?", "When was Ada Lovelace born?"),
        ("把“早上好”翻译成法语", "把“早上好”翻译成德语"),
        ("Don't do it, it's late", "Don't say it, it's late"),
    ],
)
def test_other_questions_are_other_templates(a: str, b: str) -> None:
    assert template(a) != template(b)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("What is the capital of France?", "Please: What is the capital of France", True),
        ("What is the capital of France?", "What is the capital of Spain?", False),
        ('Say "good morning" twice', "Say “Good morning” twice", True),
        ('Say "good morning" twice', 'Say "good evening" twice', False),
    ],
)
def test_names_and_quoted_parts_are_particular(a: str, b: str, same: bool) -> None:
    assert (particulars(a) == particulars(b)) is same


def test_without_letter_case_there_are_no_names() -> None:
    assert particulars("WHAT IS THE CAPITAL OF FRANCE") == particulars("what is the capital of france") == frozenset()


def test_a_task_is_weighed_by_its_user_or_else_its_source() -> None:
    line = task_line(reply(3, conversation_id="c"), "/studio.db", "t")
    weight = weigh(line)
    assert (weight.conversation, weight.user, weight.origin) == ("c", "", "source /studio.db")
    assert weight.at == START.timestamp() + 3
    line["metadata"]["user_id"] = "u"
    assert (weigh(line).user, weigh(line).origin) == ("u", "user u")
    line["metadata"]["conversation_id"] = "unknown"
    assert weigh(line).conversation == line["metadata"]["trace_id"]


def candidates(*keys: str) -> list[WeighedSample]:
    return [WeighedSample(number, key, "", 0) for number, key in enumerate(keys)]


def test_what_is_above_its_share_waits_and_the_oldest_go_first() -> None:
    many = candidates(*"aaaaaaaaaa", *"bcdefghijklmnopqrst")
    taken = within_shares(many, FREE.model_copy(update={"conversation": 0.1}), 20)
    assert len(taken) == 20
    assert taken[:2] == [0, 1]
    assert sum(number < 10 for number in taken) <= 2


def test_a_round_that_the_caps_make_smaller_has_smaller_shares() -> None:
    # 10 of one and 10 others: two of the first would be a sixth of twelve.
    taken = within_shares(candidates(*"aaaaaaaaaa", *"bcdefghijk"), FREE.model_copy(update={"conversation": 0.1}), 20)
    assert sum(number < 10 for number in taken) == 1
    assert len(taken) == 11


def test_one_of_each_is_always_allowed_and_nothing_is_capped_without_caps() -> None:
    tight = FREE.model_copy(update={"conversation": 0.01})
    assert within_shares(candidates(*"aabbcc"), tight, 6) == [0, 2, 4]
    assert within_shares(candidates(*"aaaaaa"), FREE, 4) == [0, 1, 2, 3]
    assert within_shares([], tight, 10) == []


def test_what_is_not_known_is_not_capped() -> None:
    unknown = [WeighedSample(number, f"c{number}", "", 0) for number in range(20)]
    assert len(within_shares(unknown, Influence(), 20)) == 20


CAPS = st.floats(0.01, 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), max_size=60),
    st.builds(Influence, conversation=CAPS, user=CAPS, template=CAPS),
    st.integers(1, 80),
)
def test_no_share_is_ever_above_its_cap(keys: list[tuple[int, int, int]], caps: Influence, most: int) -> None:
    free = [WeighedSample(n, f"c{c}", f"u{u}" if u else "", t) for n, (c, u, t) in enumerate(keys)]
    taken = within_shares(free, caps, most)
    assert len(taken) <= most
    assert taken == sorted(set(taken))
    by_task = {candidate.task: candidate for candidate in free}
    for name in ("conversation", "user", "template"):
        counted: dict[object, int] = {}
        for task in taken:
            if key := getattr(by_task[task], name):
                counted[key] = counted.get(key, 0) + 1
        assert all(n <= max(1, getattr(caps, name) * len(taken) + 1e-6) for n in counted.values())


def of_users(*pairs: str) -> list[WeighedSample]:
    """Candidates from `conversation user` and their numbers; `-` is a user who is not known."""
    return [
        WeighedSample(number, conversation, "" if user == "-" else user, 0)
        for number, (conversation, user) in enumerate(pair.split() for pair in pairs)
    ]


def test_a_cap_that_what_is_there_cannot_meet_is_widened_to_what_can() -> None:
    one = candidates(*"a" * 30)
    assert choose(one, Influence(), 20, 10) == Choice(list(range(20)), {"conversation": 1.0})
    three = candidates(*"aaaaaaaaaaaaaaaaaaaaaaaa", *"bbbb", *"cccc")
    chosen = choose(three, Influence(), 12, 12)
    assert (len(chosen.tasks), chosen.widened) == (12, {"conversation": 4 / 12})
    few = of_users(*(f"c{n} {'anna' if n % 2 else 'ben'}" for n in range(40)))
    chosen = choose(few, Influence(), 20, 20)
    assert (len(chosen.tasks), chosen.widened) == (20, {"user": 0.5})
    kind = [WeighedSample(n, f"c{n}", "", 7) for n in range(40)]
    assert choose(kind, Influence(), 20, 20) == Choice(list(range(20)))
    assert choose(kind, Influence(template=0.2), 20, 20) == Choice(list(range(20)), {"template": 1.0})


def test_fewer_than_a_round_needs_can_all_be_taken() -> None:
    assert choose(candidates(*"aaaaaaa"), Influence(), 20, 10).tasks == list(range(7))
    assert choose([], Influence(), 20, 10) == Choice([])


def test_a_cap_that_can_be_met_is_not_widened() -> None:
    many = candidates(*"aaaaaaaaaa", *"bcdefghijklmnopqrst")
    caps = Influence(conversation=0.1)
    assert choose(many, caps, 20, 20) == Choice(within_shares(many, caps, 20))
    # A smaller round can meet it, and suffices.
    assert choose(many, caps, 29, 19) == Choice(within_shares(many, caps, 29))


def test_nothing_is_widened_where_the_chain_says_so() -> None:
    caps = Influence(widen=False)
    assert choose(candidates(*"a" * 30), caps, 20, 10) == Choice([0])


def test_caps_that_can_be_met_one_by_one_and_not_together_are_widened() -> None:
    # Half of one user in many conversations, half of one conversation of other users.
    mixed = of_users(*(f"c{n} anna" for n in range(10)), *(f"shared u{n}" for n in range(10)))
    chosen = choose(mixed, Influence(conversation=0.5, user=0.1), 20, 16)
    assert len(chosen.tasks) >= 16
    assert set(chosen.widened) <= {"conversation", "user"}
    assert chosen.widened["user"] >= 0.3


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)), max_size=60),
    st.builds(Influence, conversation=CAPS, user=CAPS, template=CAPS),
    st.integers(1, 80),
    st.integers(1, 80),
)
def test_a_round_is_filled_whatever_is_there_and_keeps_to_what_is_said(
    keys: list[tuple[int, int, int]], caps: Influence, most: int, needed: int
) -> None:
    free = [WeighedSample(n, f"c{c}", f"u{u}" if u else "", t) for n, (c, u, t) in enumerate(keys)]
    chosen = choose(free, caps, most, needed)
    assert min(needed, most, len(free)) <= len(chosen.tasks) <= most
    by_task = {candidate.task: candidate for candidate in free}
    for name in ("conversation", "user", "template"):
        share = chosen.widened.get(name, getattr(caps, name))
        assert share >= getattr(caps, name)
        counted = Counter(key for task in chosen.tasks if (key := getattr(by_task[task], name)))
        assert all(n <= max(1, share * len(chosen.tasks) + 1e-6) for n in counted.values())
    strict = within_shares(free, caps, most)
    if len(strict) >= min(needed, most, len(free)):
        assert chosen == Choice(strict)
