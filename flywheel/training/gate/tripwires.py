"""What the tripwires of the gate measure of answers, without a judge: length, cuts, failed calls, invalid formats.

Each answer has a value from 0 to 1 of each measure, so that more is better; which loss is harm says
`flywheel.training.gate.gate.TRIPWIRES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from flywheel.errors import CheckError
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.call_format import CallFormat
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.tool_calls import calls_in
from flywheel.training.data.rollout import Rollout, exchange

SHORTEST: Final = 200
"""An answer with fewer characters counts as that long: that "4" becomes "It is 4." is no harm."""
_CALLS: Final = CallFormat(id="calls")
_FORMATS: Final = frozenset({"json-schema", "call-format"})
"""Checks of a rubric that are about the form of an answer alone."""

Values = tuple[float | None, ...]


def measures(
    candidate: Sequence[Sequence[Rollout]], deployed: Sequence[Sequence[Rollout]], rubric: Rubric | None
) -> dict[str, list[tuple[Values, Values]]]:
    """The values of candidate and deployed adapter by measure: for each prompt one per seed, of the lengths one in
    all. `candidate` and `deployed` have the answers to each prompt by seed.

    None where it was not measured for both: an answer failed, or a measure is not about it.
    """
    found: dict[str, list[tuple[Values, Values]]] = {}
    for ours, theirs in zip(candidate, deployed, strict=True):
        both = [(_of(new, rubric), _of(old, rubric)) for new, old in zip(ours, theirs, strict=True)]
        for name in ("cut", "failed_calls", "invalid_format"):
            pairs = [(new.get(name), old.get(name)) for new, old in both]
            known = [(None, None) if None in pair else pair for pair in pairs]
            found.setdefault(name, []).append((tuple(new for new, _ in known), tuple(old for _, old in known)))
        lengths = [(new["length"], old["length"]) for new, old in both if new and old]
        for name, value in _by_length(lengths).items():
            found.setdefault(name, []).append(((value,), (None if value is None else 1.0,)))
    return found


def _of(rollout: Rollout, rubric: Rubric | None) -> Mapping[str, float]:
    """What is known of an answer; nothing if there is none."""
    completion = rollout.completion
    if completion.error:
        return {}
    calls = calls_in(completion.steps)
    # That nothing was recorded is not the fault of a call.
    missed = sum(call.is_miss for call in completion.calls)
    found = {"length": float(max(len(completion.text), SHORTEST)), "cut": float(not completion.truncated)}
    if len(calls) > missed:
        found["failed_calls"] = 1 - (sum(call.failed for call in calls) - missed) / (len(calls) - missed)
    forms = [
        1 - rollout.values[each.id] if each.weight < 0 else rollout.values[each.id]
        for each in (rubric.every if rubric is not None else ())
        if each.type in _FORMATS and each.id in rollout.values
    ]
    if calls or rollout.request.prompt.task.exchange.tools:
        try:
            forms.append(check(_CALLS, exchange(rollout.request.prompt, completion)).value)
        except CheckError:  # a schema that takes too long
            return found
    return found | ({"invalid_format": min(forms)} if forms else {})


def _by_length(lengths: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """1 if the candidate's answers to a prompt are not much longer, and not much shorter, else 0. A median ratio is
    beyond 2 if that of more than half of all prompts is."""
    if not lengths:
        return {"longer": None, "shorter": None}
    ours, theirs = (statistics.fmean(side) for side in zip(*lengths, strict=True))
    return {"longer": float(ours <= 2 * theirs), "shorter": float(2 * ours >= theirs)}
