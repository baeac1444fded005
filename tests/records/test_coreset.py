"""Coresets: an order in which no text comes twice before all were there once."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.records.coreset import Order, farthest, in_order, text_of
from flywheel.records.selection import Candidate, SelectionRules, TaskClass, select
from flywheel.records.similarity import jaccard, normalised, word_signatures, words

ORDERS: tuple[Order, ...] = ("random", "diversity")
TEXTS = st.sampled_from(
    [
        "",
        "?!",
        "1",
        "What is 3 plus 4?",
        "what is 3 plus 4",
        "What is 3 plus 5?",
        "早上好",
        "早上好!",
        "晚上好",
        "สวัสดี",
    ]
)


def candidates(count: int) -> list[Candidate]:
    return [Candidate(number) for number in range(count)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(TEXTS, st.sampled_from(list(TaskClass)), st.integers(0, 2))),
    st.sampled_from(ORDERS),
    st.integers(1, 12),
    st.integers(0, 99),
    st.booleans(),
)
def test_no_text_is_chosen_twice_while_a_distinct_one_remains(
    found: list[tuple[str, TaskClass, int]], order: Order, size: int, seed: int, has_quotas: bool
) -> None:
    free = [Candidate(number, structure=each, uses=uses) for number, (_, each, uses) in enumerate(found)]
    texts = {number: text for number, (text, *_) in enumerate(found)}
    weights = {"one_tool": 2.0, "no_tools": 1.0} if has_quotas else {}
    ordered = in_order(free, texts, order, size, seed)
    assert sorted(each.task for each in ordered) == [each.task for each in free]
    assert ordered == in_order(list(free), dict(texts), order, size, seed)
    chosen = set(select(ordered, SelectionRules(50, 1, weights=weights, size=size)).tasks)
    said = {number: normalised(text) for number, text in texts.items()}
    taken = [said[task] for task in chosen]
    # Of classes with quotas, another one may have the only text that is left.
    assert has_quotas or len(set(taken)) == min(len(taken), len(set(said.values())))


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_diversity_takes_what_differs_most(language: str) -> None:
    """Nine of ten questions are about one thing; the others are found, in a script without spaces, too."""
    drawn = random.Random(1)
    common = "How long does the delivery of order {} take" if language == "english" else "订单{}的送货需要多长时间呢"
    rare = (
        ["Do you sell gift cards", "My password is wrong", "Where is your shop", "Cancel everything now"]
        if language == "english"
        else ["你们卖礼品卡吗", "我的密码不对", "商店在哪里", "现在取消一切"]
    )
    texts = [common.format(drawn.randrange(10**6)) for _ in range(400)] + rare
    drawn.shuffle(texts)
    by_task = dict(enumerate(texts))
    chosen = in_order(candidates(len(texts)), by_task, "diversity", 8, 1)[:8]
    assert set(rare) < {by_task[each.task] for each in chosen}
    by_chance = in_order(candidates(len(texts)), by_task, "random", 8, 1)[:8]
    assert not set(rare) < {by_task[each.task] for each in by_chance}


def test_signatures_estimate_the_share_of_common_words() -> None:
    drawn = random.Random(2)
    texts = [" ".join(drawn.sample([f"w{n}" for n in range(40)], 20)) for _ in range(30)]
    signatures = word_signatures(texts)
    assert signatures.shape == (64, 30)
    errors = [
        abs(float((signatures[:, a] == signatures[:, b]).mean()) - jaccard(words(texts[a]), words(texts[b])))
        for a, b in combinations(range(30), 2)
    ]
    assert sum(errors) / len(errors) < 0.06
    assert word_signatures([]).shape == (64, 0)


def test_each_next_one_is_the_least_like_what_was_taken() -> None:
    signatures = word_signatures(["a b c d", "a b c d", "a b c e", "x y z", "a b x y"])
    assert farthest(signatures, 9)[:2] == [0, 3]
    assert farthest(signatures, 9)[-1] == 1
    assert farthest(signatures, 2) == [0, 3]


def test_random_takes_those_of_the_fewest_rounds_first() -> None:
    free = [Candidate(number, uses=number % 2) for number in range(40)]
    texts = {number: f"question {number}" for number in range(40)}
    ordered = [each.task for each in in_order(free, texts, "random", 10, 1)]
    assert {number % 2 for number in ordered[:20]} == {0}
    assert ordered[:20] != sorted(ordered[:20])
    assert ordered != [each.task for each in in_order(free, texts, "random", 10, 2)]


def test_the_text_of_a_task_is_what_the_user_said() -> None:
    history = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
    ]  # fmt: skip
    assert text_of(history, "Who?") == "Hi.\nWho?"
