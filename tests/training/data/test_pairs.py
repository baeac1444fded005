"""Which replies are pairs: the best and the worst of a prompt, whole and far enough apart; none is lost sight of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.task import task_line
from flywheel.training.data import pairs
from flywheel.training.data.export_formats import reply_of
from flywheel.training.data.pairs import ALONE, CLOSE, SAME, USED_UP, Pairs, Reply, matched
from flywheel.training.data.rollout import Rollout, RolloutBatch
from flywheel.training.data.samples import RecordedReply, Sample
from tests.factories.task import round_task
from tests.factories.trace import reply
from tests.training.data.formats.filling import call, exported, result
from tests.training.data.rollouts import failed, missed, rollout

REWARDS = st.lists(
    st.lists(st.none() | st.integers(0, 20).map(lambda each: each / 20), min_size=4, max_size=6), max_size=5
)


def own_tokens(rewards: list[list[float | None]]) -> RolloutBatch:
    """A batch with these rewards by group; no two rollouts have the same tokens."""
    return RolloutBatch(
        tuple(
            rollout(group, reward, (8, 10 + place))
            for group, several in enumerate(rewards)
            for place, reward in enumerate(several)
        )
    )


@given(rewards=REWARDS, margin=st.sampled_from([0.05, 0.1, 0.3]))
def test_each_group_gives_its_extremes_or_none(rewards: list[list[float | None]], margin: float) -> None:
    made = Pairs()
    made.add_rollouts(own_tokens(rewards), margin)
    expected = []
    for group, several in enumerate(rewards):
        known = [reward for reward in several if reward is not None]
        if known and round(max(known) - min(known), 9) >= margin:
            expected.append((f"t-{group}", max(known), min(known)))
    assert [(pair.task_id, pair.chosen_score, pair.rejected_score) for pair in made.pairs] == expected
    assert len(made.left_out) == len(rewards) - len(expected)
    assert len(made.lines) == len(made.pairs)


def change(one: Rollout, **completion: object) -> Rollout:
    return replace(one, completion=replace(one.completion, **completion))  # type: ignore[arg-type]


def test_rollouts_that_are_not_whole_are_in_no_pair_and_counted() -> None:
    best, several, cut, worst = own_tokens([[0.7, 1.0, 0.9, 0.1]]).rollouts
    two = several.completion.samples * 2
    made = Pairs()
    made.add_rollouts(
        RolloutBatch((best, change(several, samples=two), change(cut, truncated=True), worst)), margin=0.1
    )
    [pair] = made.pairs
    assert (pair.chosen, pair.rejected) == (best.completion.samples[0], worst.completion.samples[0])
    assert (made.left_out, made.rollouts) == ({}, {pairs.SEVERAL: 1, pairs.TOO_LONG: 1})
    assert made.reasons == f"1 {pairs.SEVERAL}; 1 {pairs.TOO_LONG}"


@pytest.mark.parametrize("whole", [0, 1])
def test_a_group_with_fewer_than_two_usable_rollouts_has_no_rewards_to_compare(whole: int) -> None:
    usable, undecided, cut, several = own_tokens([[0.9, None, 0.1, 0.5]]).rollouts
    others = (
        undecided,
        failed(0),
        change(cut, truncated=True),
        change(several, samples=several.completion.samples * 2),
    )
    made = Pairs()
    made.add_rollouts(RolloutBatch((*(usable,) * whole, *others)), 0.1)
    assert (made.pairs, made.left_out) == ([], {"t-0": pairs.FEW})
    assert made.rollouts == {pairs.SEVERAL: 1, pairs.TOO_LONG: 1}
    assert made.reasons == f"{pairs.FEW}; 1 {pairs.TOO_LONG}; 1 {pairs.SEVERAL}"


def test_rollouts_with_the_tokens_of_the_best_are_passed_over() -> None:
    best, like_it, worse = (rollout(0, 0.9, (8,)), rollout(0, 0.1, (8,)), rollout(0, 0.3, (9,)))
    made = Pairs()
    made.add_rollouts(RolloutBatch((like_it, best, worse)), 0.1)
    assert [(pair.chosen_score, pair.rejected_score) for pair in made.pairs] == [(0.9, 0.3)]


def test_a_group_with_many_misses_is_left_out() -> None:
    several = own_tokens([[0.1, 0.9]]).rollouts
    made = Pairs()
    made.add_rollouts(RolloutBatch((*several, missed(0), missed(0))), 0.1)
    assert made.pairs == []
    assert made.left_out == {"t-0": pairs.MISSES}


@pytest.mark.parametrize(
    ("worse", "reason"),
    [
        (RecordedReply("t-1", (Sample((5, 6, 8), (False, False, True)),)), None),
        (RecordedReply("t-1", (Sample((5, 8), (False, True)), Sample((6, 8), (False, True)))), pairs.UNRENDERED),
        (RecordedReply("t-1", (Sample((5, 7), (False, True)),)), SAME),
        (None, "it is refused"),
    ],
)
def test_recorded_pairs(worse: RecordedReply | None, reason: str | None, tmp_path: Path) -> None:
    task = round_task("t-1", reply=({"role": "assistant", "content": "7"},))
    worse_reply = ({"role": "assistant", "content": "8"},)
    task = task.model_copy(update={"rejected": worse_reply, "rejected_task_id": "t-worse"})
    better = RecordedReply("t-1", (Sample((5, 7), (False, True)),))
    made = Pairs()
    refused, rejected = ({"t-1": "it is refused"}, {}) if worse is None else ({}, {"t-1": worse})
    made.add_recorded([task], {"t-1": better}, rejected, refused)
    assert made.left_out == ({} if reason is None else {"t-1": reason})
    made.write(tmp_path / "1-dpo")
    lines = [json.loads(line) for line in (tmp_path / "1-dpo" / "pairs.jsonl").read_text().splitlines()]
    if reason is not None:
        assert lines == []
        return
    [line] = lines
    assert (line["chosen"], line["rejected"]) == (
        [{"role": "assistant", "content": "7"}],
        [{"role": "assistant", "content": "8"}],
    )
    assert line["source"] == "recorded"
    assert (line["task_id"], line["chosen_task_id"], line["rejected_task_id"]) == ("t-1", "t-1", "t-worse")
    assert line["prompt"][-1]["role"] == "user"


def test_the_file_is_what_trl_reads(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = Pairs()
    made.add_rollouts(own_tokens([[0.1, 0.9, 0.5, 0.5]]), 0.1)
    made.write(tmp_path)
    [row] = datasets.Dataset.from_json(str(tmp_path / "pairs.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert row["prompt"][-1] == {"role": "user", "content": "What is 3 plus 4?"}
    assert row["chosen"] == [{"role": "assistant", "content": "seven"}]


SCORES = st.sampled_from([0.0, 0.1, 0.3, 0.7, 0.8, 1.0])
REPLIES = st.lists(st.tuples(st.sampled_from("abc"), SCORES), max_size=7)


@given(REPLIES, REPLIES, st.sampled_from([0.0, 0.2, 0.7, 1.0]))
def test_pairs_are_distinct_wide_and_disjoint(
    good: list[tuple[str, float]], bad: list[tuple[str, float]], margin: float
) -> None:
    better = [Reply(("good", number), *values) for number, values in enumerate(good)]
    worse = [Reply(("bad", number), *values) for number, values in enumerate(bad)]
    pairs, left_out = matched(better, worse, margin)

    def fit(one: Reply[Any], other: Reply[Any]) -> bool:
        gap = round(one.score - other.score, 9)
        return one.says != other.says and gap > 0 and gap >= margin

    assert all(one in better and other in worse and fit(one, other) for one, other in pairs)
    used = [reply.of for pair in pairs for reply in pair]
    assert len(used) == len(set(used))
    assert len(used) + sum(left_out.values()) == len(better) + len(worse)
    # Nothing that is left makes a pair, and the first pair is of the best that can be in one and the worst for it.
    assert not any(fit(one, other) for one in better for other in worse if not {one.of, other.of} & {*used})
    assert bool(pairs) == any(fit(one, other) for one in better for other in worse)
    for one, other in pairs[:1]:
        assert one.score == max(each.score for each in better if any(fit(each, some) for some in worse))
        assert other.score == min(each.score for each in worse if fit(one, each))


def test_reasons_of_replies_that_are_in_no_pair() -> None:
    reasons = [
        matched([Reply(number, *one) for number, one in enumerate(better)], [Reply(9, *worse)], 0.2)[1]
        for better, worse in (
            ([], ("a", 0.1)),
            ([("a", 1.0)], ("a", 0.1)),
            ([("b", 0.3), ("a", 1.0)], ("a", 0.2)),
            ([("b", 1.0), ("c", 0.9)], ("a", 0.2)),
        )
    ]
    assert reasons == [{ALONE: 1}, {SAME: 2}, {CLOSE: 2, SAME: 1}, {USED_UP: 1}]


def test_replies_that_differ_in_their_calls_alone_differ() -> None:
    def of(number: int, arguments: str) -> object:
        steps = (call(number, "add", arguments), result(number, "add", "2"))
        line = task_line(reply(1, trajectory=steps), "studio")
        _, one = reply_of(exported(line))
        return one.says

    assert of(1, '{"a": 1, "b": 2}') == of(2, '{"b": 2, "a": 1}'), "the ids of calls say nothing"
    assert of(1, '{"a": 1}') != of(1, '{"a": 2}')
