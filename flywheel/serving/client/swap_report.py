"""Reports of swaps, rollbacks and checks: one per replica, one for all, with the condition of each replica."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from flywheel.errors import ServeError
from flywheel.serving.client.replica_condition import Condition
from flywheel.serving.client.weight_verification import ProbeFigures


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The result on one replica.

    `previous` is the model that answered before, `serves` the one that answers now, both empty if unknown or none;
    `error` is the reason why nothing was done.
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
        """A replica without a change, which still `serves` another model than the `wanted` one."""
        is_told = error.condition != Condition.FAILING
        condition = Condition.WRONG_ADAPTER if serves != wanted and not is_told else error.condition
        return cls(url, serves, error=str(error), serves=serves, condition=condition)


@dataclass(frozen=True, slots=True)
class SwapReport:
    """The results on all replicas. `target` is the served name of the version, empty for the base model."""

    alias: str
    target: str
    replicas: tuple[ReplicaReport, ...]

    @property
    def changed(self) -> tuple[ReplicaReport, ...]:
        return tuple(replica for replica in self.replicas if replica.loaded or replica.flipped)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(replica.error for replica in self.replicas if replica.error)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class RollbackError(ServeError):
    """Some replicas did not go back; `report` names them."""

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
