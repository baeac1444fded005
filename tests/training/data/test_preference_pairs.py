"""Preference pairs, whatever the replies: what must hold for every pair, and every reply is accounted for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.states import TaskState
from flywheel.records.task import task_line
from flywheel.training.data.export_formats import ExportSample, reply_of
from flywheel.training.data.pairs import ALONE, CLOSE, SAME, USED_UP, Reply, matched
from tests.factories.trace import reply
from tests.training.data.formats.filling import call, result

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
        _, one = reply_of(1, ExportSample(line, TaskState.ACCEPTED, 1.0))
        return one.says

    assert of(1, '{"a": 1, "b": 2}') == of(2, '{"b": 2, "a": 1}'), "the ids of calls say nothing"
    assert of(1, '{"a": 1}') != of(1, '{"a": 2}')
