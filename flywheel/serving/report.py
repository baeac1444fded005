"""What was found and done on replicas: one report for each, one for all, and the condition that each is in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from flywheel.errors import ServeError
from flywheel.serving.condition import Condition
from flywheel.serving.probe import ProbeFigures


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What was found and done on one replica.

    `previous` is what the alias stood for there before, `serves` what it stands for now, both empty where that is not
    known; `error` why nothing was done.
    """

    url: str
    previous: str = ""
    loaded: bool = False
    flipped: bool = False
    probe: ProbeFigures | None = None
    error: str = ""
    serves: str = ""
    condition: str = Condition.OK

    @classmethod
    def failed(cls, url: str, error: ServeError, *, serves: str = "", wanted: str = "") -> ReplicaReport:
        """Nothing was done, and the replica still `serves` that, instead of what is `wanted`."""
        is_told = error.condition != Condition.FAILING
        condition = Condition.WRONG_ADAPTER if serves != wanted and not is_told else error.condition
        return cls(url, serves, error=str(error), serves=serves, condition=condition)


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What was done on all of them. `target` is the served name of the version, empty for the base model."""

    alias: str
    target: str
    replicas: tuple[ReplicaReport, ...]

    @property
    def changed(self) -> bool:
        return any(replica.loaded or replica.flipped for replica in self.replicas)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(replica.error for replica in self.replicas if replica.error)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class RollbackError(ServeError):
    """Not every replica went back; `report` says which did."""

    def __init__(self, report: SwapReport) -> None:
        self.report = report
        went = any(not replica.error for replica in report.replicas)
        super().__init__(
            f"roll {report.alias} back to {report.target or 'the base model'} on every replica",
            " ".join(report.errors),
            "The others have it. The daemon brings these there when they answer again; without it, roll back again."
            if went
            else "Nothing was changed. Mend this and roll back again.",
            retryable=True,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.report,))
