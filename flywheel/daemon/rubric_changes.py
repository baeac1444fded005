"""What differs between two rubrics, and what that did to a score. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flywheel.rubric import Criterion, Rubric
from flywheel.verdict import CriterionResult, Verdict

SAME: Final = 1e-9


@dataclass(frozen=True, slots=True)
class RubricChange:
    """One difference; `criterion` is empty for what is about the whole rubric."""

    criterion: str
    what: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a criterion gave to the old and to the new score; None where it has no result. `why` may have parts."""

    criterion: str
    old: float | None
    new: float | None
    why: str

    @property
    def difference(self) -> float:
        return (self.new or 0.0) - (self.old or 0.0)


def changes(old: Rubric, new: Rubric) -> list[RubricChange]:
    """All differences that can change a verdict."""
    found = []
    if old.threshold != new.threshold:
        found.append(RubricChange("", f"threshold {old.threshold:g} → {new.threshold:g}"))
    if old.judge != new.judge:
        before, after = old.judge.model_dump(), new.judge.model_dump()
        told = ", ".join(
            f"{key} {_told(before.get(key))} → {_told(after.get(key))}" for key in _differing(before, after)
        )
        found.append(RubricChange("", f"judge: {told}"))
    olds, news = ({each.id: each for each in rubric.every} for rubric in (old, new))
    for name in dict.fromkeys([*news, *olds]):
        if what := ", ".join(_criterion_changes(olds.get(name), news.get(name))):
            found.append(RubricChange(name, what))
    if not found and old.hash != new.hash:
        found.append(RubricChange("", "the order of the criteria, or a file that they use"))
    return found


def contributions(old: Rubric, new: Rubric, was: Verdict, now: Verdict) -> list[Contribution]:
    """The criteria whose contribution to the score changed, those first that changed themselves."""
    olds, news = ({each.id: each for each in rubric.every} for rubric in (old, new))
    before, after = _results(was), _results(now)
    shares = _share(old), _share(new)
    found = []
    for name in dict.fromkeys([*news, *olds]):
        gave = _gave(olds.get(name), before.get(name), shares[0])
        gives = _gave(news.get(name), after.get(name), shares[1])
        why = [
            *_criterion_changes(olds.get(name), news.get(name)),
            *_choice_changes(before.get(name), after.get(name)),
            *_stops(olds.get(name), news.get(name), before.get(name), after.get(name)),
        ]
        if why or abs((gives or 0.0) - (gave or 0.0)) > SAME:
            found.append((not why, Contribution(name, gave, gives, ", ".join(why) or "its share of the score")))
    return [each for _, each in sorted(found, key=lambda pair: (pair[0], -abs(pair[1].difference)))]


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]


def _told(value: object) -> str:
    return "–" if value is None else str(value)


def _share(rubric: Rubric) -> float:
    return sum(each.weight for each in rubric.every if each.weight > 0)


def _results(verdict: Verdict) -> dict[str, CriterionResult]:
    return {result.criterion: result for result in verdict.results}


def _gave(criterion: Criterion | None, result: CriterionResult | None, share: float) -> float | None:
    return None if criterion is None or result is None else round(criterion.weight * result.value / share, 9)


def _criterion_changes(old: Criterion | None, new: Criterion | None) -> list[str]:
    if old is None or new is None:
        return ["new"] if old is None else ["removed"]
    found = []
    if old.type != new.type:
        found.append(f"{old.type} → {new.type}")
    elif old.value != new.value:
        found.append("reworded" if new.asks_the_judge else "another value")
    elif _rest(old) != _rest(new):
        found.append("other options")
    if dict(old.scale) != dict(new.scale):
        found.append("other choices" if list(old.scale) != list(new.scale) else "other values of its choices")
    if old.weight != new.weight:
        found.append(f"weight {old.weight:g} → {new.weight:g}")
    if old.required != new.required:
        found.append("required now" if new.required else "no longer required")
    return found


def _rest(criterion: Criterion) -> dict[str, object]:
    return criterion.model_dump(include={"reference", "min", "max", "match"})


def _choice_changes(was: CriterionResult | None, now: CriterionResult | None) -> list[str]:
    if was is None or now is None or was.choice == now.choice:
        return []
    return [f"{was.choice} → {now.choice}"]


def _stops(
    old: Criterion | None, new: Criterion | None, was: CriterionResult | None, now: CriterionResult | None
) -> list[str]:
    """A failed required criterion decides by itself."""
    stopped = old is not None and old.required and was is not None and not was.passed
    stops = new is not None and new.required and now is not None and not now.passed
    return [] if stops == stopped else ["it fails and is required" if stops else "it does not stop it any more"]
