"""Recall: what the judge said of an exchange under earlier rubrics that still holds under this one. No I/O.

An opinion on a criterion holds as long as the judge would be told the same of it: its statement, its choices and
their order, and whether it is asked alone. Its weight, its place, the values of its choices, its name and the
threshold are no matter of the judge: they are applied anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flywheel.rubric import FLAT_ID, Criterion, Rubric
from flywheel.verdict import CriterionResult, Verdict


def criterion_hash(criterion: Criterion, *, alone: bool) -> str:
    """Changes with all that the judge is told of a criterion, and with being asked in a call of its own (`alone`)."""
    told = [criterion.type, str(criterion.value).strip(), list(criterion.scale), criterion.id == FLAT_ID, alone]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def criterion_hashes(rubric: Rubric) -> Mapping[str, str]:
    """The hashes of the criteria that the judge decides, by their ids."""
    alone = rubric.judge.per_criterion
    return MappingProxyType({each.id: criterion_hash(each, alone=alone) for each in rubric.asked})


class Recall:
    """What earlier verdicts of one judge on one exchange say about a rubric's criteria.

    Opinions that were asked for because a score was close are kept apart from those that are asked for of every task.
    """

    def __init__(self, rubric: Rubric, hashes: Mapping[str, str], earlier: Sequence[Verdict]) -> None:
        """`earlier` are decided verdicts, the newest first."""
        self._rubric = rubric
        self._hashes = hashes
        # Verdicts hold copies of what they recalled themselves: opinions of two verdicts are not to be added up.
        self._said: dict[tuple[str, str], list[CriterionResult]] = {}
        wanted = set(hashes.values())
        for verdict in earlier:
            for key, results in _opinions(verdict, wanted).items():
                if len(results) > len(self._said.get(key, ())):
                    self._said[key] = results

    def of(self, stage: str, place: int) -> dict[str, CriterionResult]:
        """The results that hold of the opinion number `place` of a stage, by criterion."""
        found = {}
        for criterion in self._rubric.asked:
            told = self._hashes[criterion.id]
            said = self._said.get((stage, told), ())
            if place < len(said):
                was = said[place]
                value = criterion.scale[was.choice]
                passed = criterion.passes(value)
                found[criterion.id] = CriterionResult(criterion.id, was.choice, value, passed, was.reason, told)
        return found


def _opinions(verdict: Verdict, wanted: set[str]) -> dict[tuple[str, str], list[CriterionResult]]:
    found: dict[tuple[str, str], list[CriterionResult]] = {}
    for judgement in verdict.judgements:
        seen = set()
        for result in judgement.results:
            # Two criteria that say the same have one opinion each, and one of them is enough.
            if result.hash in wanted and result.hash not in seen:
                seen.add(result.hash)
                found.setdefault((judgement.stage, result.hash), []).append(result)
    return found
