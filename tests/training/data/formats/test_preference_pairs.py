"""Preference pairs, whatever the replies: what must hold for every pair, and every reply is accounted for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.states import TaskState
from flywheel.records.task import task_line
from flywheel.training.data.formats.export_format import ExportSample
from flywheel.training.data.formats.preference_pairs import PairCandidate, Pairing, candidate
from tests.factories.trace import reply
from tests.training.data.formats.filling import call, result

candidates = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from([b"p", b"q"]),
        st.sampled_from([b"a", b"b", b"c"]),
        st.sampled_from([0.0, 0.1, 0.3, 0.7, 0.8, 1.0]),
    ),
    max_size=14,
)


@given(candidates, st.sampled_from([0.0, 0.2, 0.7, 1.0]))
def test_pairs_are_of_one_prompt_distinct_wide_and_disjoint(
    told: list[tuple[bool, bytes, bytes, float]], margin: float
) -> None:
    pairing = Pairing(margin)
    every = {number: PairCandidate(number, *values) for number, (_, *values) in enumerate(told)}
    accepted = {number for number, (is_accepted, *_) in enumerate(told) if is_accepted}
    for number in every.keys() - accepted:
        pairing.add_rejected(every[number])
    for number in accepted:
        pairing.add_accepted(every[number])
    pairs = pairing.pairs()
    for better, worse in pairs:
        assert better in accepted
        assert worse not in accepted
        assert every[better].prompt == every[worse].prompt
        assert every[better].answer != every[worse].answer
        gap = round(every[better].score - every[worse].score, 9)
        assert gap > 0
        assert gap >= margin
    used = [number for pair in pairs for number in pair]
    assert len(used) == len(set(used))
    assert len(used) + sum(pairing.left_out.values()) == len(every)
    # What is left of a prompt has no pair in it.
    for better in accepted - set(used):
        for worse in every.keys() - accepted - set(used):
            one, other = every[better], every[worse]
            gap = round(one.score - other.score, 9)
            assert one.prompt != other.prompt or one.answer == other.answer or gap <= 0 or gap < margin


def test_replies_that_differ_in_their_calls_alone_differ() -> None:
    def of(number: int, arguments: str) -> bytes:
        steps = (call(number, "add", arguments), result(number, "add", "2"))
        line = task_line(reply(1, trajectory=steps), "studio")
        return candidate(1, ExportSample(line, TaskState.ACCEPTED, 1.0)).answer

    assert of(1, '{"a": 1, "b": 2}') == of(2, '{"b": 2, "a": 1}'), "the ids of calls say nothing"
    assert of(1, '{"a": 1}') != of(1, '{"a": 2}')
