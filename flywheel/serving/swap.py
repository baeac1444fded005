"""The swap: an adapter is loaded on every replica, proven on every replica, and only then does the alias move.

Until the last replica has it the old version serves, and whatever goes wrong before leaves it serving. What is
deployed is the caller's to remember; adapters' directories are never touched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flywheel.config import ServingSettings
from flywheel.errors import FlywheelError, ServeError
from flywheel.round import Probe
from flywheel.serving.client import Replica
from flywheel.serving.probe import ProbeFigures, prove
from flywheel.states import DeploymentState

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What was done on one replica. `previous` is what the alias stood for there, `error` why nothing was done."""

    url: str
    previous: str = ""
    loaded: bool = False
    flipped: bool = False
    probe: ProbeFigures | None = None
    error: str = ""


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


class OnState(Protocol):
    """Is told how far a swap has come; with `active`, also what was done. What it raises takes the swap back."""

    async def __call__(self, state: DeploymentState, report: SwapReport | None = None, /) -> None: ...


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


@dataclass(slots=True)
class _Step:
    """How far the swap has come on one replica."""

    replica: Replica
    previous: str
    previous_path: str | None
    target: str
    loaded: bool
    probe: ProbeFigures | None = None
    flip_tried: bool = False


def version_name(alias: str, adapter: str) -> str:
    """Under which name an adapter is served: `my-agent@r0007`. A version's name never gets other weights."""
    return f"{alias}@{adapter}"


async def swap(
    replicas: Sequence[Replica],
    alias: str,
    adapter_name: str | None,
    path: str | None,
    probe: Probe | None,
    settings: ServingSettings,
    on_state: OnState,
) -> SwapReport:
    """Let `alias` answer with `adapter_name` (`r0007`; None: the base model) on every replica, or on none.

    `on_state` is told of loading, probing, and active or failed. Raises ServeError, and whatever `on_state` raised,
    after everything was put back; the error names what could not be.
    """
    target = version_name(alias, adapter_name) if adapter_name else ""
    steps: list[_Step] = []
    try:
        await on_state(DeploymentState.LOADING)
        await _every([_prepare(replica, alias, target, path, steps) for replica in replicas])
        await on_state(DeploymentState.PROBING)
        if target and probe is not None:
            await _every([_prove(step, probe, settings.probe_tolerance) for step in steps])
        if target:
            await _every([_still_there(step) for step in steps])
        for step in steps:
            step.flip_tried = True
            await step.replica.flip(alias, step.target, step.previous, path)
        by_url = {step.replica.url: step for step in steps}
        done = [by_url[replica.url] for replica in replicas]
        reports = [ReplicaReport(s.replica.url, s.previous, s.loaded, s.previous != s.target, s.probe) for s in done]
        report = SwapReport(alias, target, tuple(reports))
        await on_state(DeploymentState.ACTIVE, report)
    except BaseException as error:
        # Shielded: a stop of the daemon in the middle must not leave the replicas with different versions.
        left = await asyncio.shield(_undo(steps, alias))
        await on_state(DeploymentState.FAILED)
        if left and isinstance(error, FlywheelError):
            raise ServeError(error.attempted, f"{error.why}; moreover, {'; '.join(left)}", error.hint) from error
        raise
    return report


async def rollback(
    replicas: Sequence[Replica], alias: str, adapter_name: str | None, path: str | None, settings: ServingSettings
) -> SwapReport:
    """Go back to a version that has served before (None: the base model), at once, wherever that is possible.

    Unlike a swap it does not wait for the slowest: a replica that cannot be reached keeps none of the others from
    going back. Raises RollbackError, naming those, when it has done what it could or is stopped while it waits.
    """
    target = version_name(alias, adapter_name) if adapter_name else ""
    going = [asyncio.create_task(_restore(each, alias, target, path, None, settings)) for each in replicas]
    stopped = None
    try:
        await asyncio.wait(going)
    except asyncio.CancelledError as stop:
        stopped = stop
        for task in going:
            task.cancel()
        await asyncio.wait(going)
    unknown = "{}: stopped before it had answered."
    reports = [
        ReplicaReport(each.url, error=unknown.format(each.url)) if task.cancelled() else task.result()
        for each, task in zip(replicas, going, strict=True)
    ]
    report = SwapReport(alias, target, tuple(reports))
    if stopped and len(report.errors) == len(replicas):
        raise stopped
    if report.errors:
        raise RollbackError(report)
    return report


async def reconcile(
    replicas: Sequence[Replica],
    alias: str,
    adapter_name: str | None,
    path: str | None,
    probe: Probe | None,
    settings: ServingSettings,
) -> SwapReport:
    """Bring replicas back to what is deployed: a restarted server has forgotten its adapters.

    Raises nothing for a replica that cannot be brought back: its report says why. Not to be run during a swap.
    """
    target = version_name(alias, adapter_name) if adapter_name else ""
    restored = [_restore(each, alias, target, path, probe, settings) for each in replicas]
    return SwapReport(alias, target, tuple(await asyncio.gather(*restored)))


async def retire(
    replicas: Sequence[Replica], alias: str, keep: Collection[str], settings: ServingSettings
) -> dict[str, list[str]]:
    """Unload the versions of `alias` that nothing needs any more; which were, per replica.

    `keep` are adapters by name (the deployed one and those to roll back to). What serves is kept in any case, and a
    version goes only after it has not served for `drain_seconds`: requests that were given it have long begun by
    then. Not to be run during a swap.
    """
    kept = {version_name(alias, name) for name in keep}

    async def idle(replica: Replica) -> set[str]:
        serving = (await replica.alias(alias)).target
        loaded = [name for name in await replica.models() if name.startswith(version_name(alias, ""))]
        return {name for name in loaded if name not in kept and name != serving}

    async def drain(replica: Replica) -> list[str]:
        try:
            old = await idle(replica)
            if old:
                await asyncio.sleep(settings.drain_seconds)
                old &= await idle(replica)
            return [name for name in sorted(old) if await replica.unload(name)]
        except ServeError as error:
            # What stays loaded costs memory and nothing else; the next swap tries again.
            log.warning("old versions stay loaded: %s", error)
            return []

    return dict(zip([r.url for r in replicas], await asyncio.gather(*map(drain, replicas)), strict=True))


async def _prepare(replica: Replica, alias: str, target: str, path: str | None, steps: list[_Step]) -> None:
    before = await replica.alias(alias)
    step = _Step(replica, before.target, before.path, target or before.base_model, loaded=False)
    steps.append(step)
    if not target:
        return
    if path is None:
        raise ServeError(f"load adapter {target} on {replica.url}", "its directory is not known", "Name another one.")
    step.loaded = await replica.load(target, path)


async def _restore(
    replica: Replica, alias: str, target: str, path: str | None, probe: Probe | None, settings: ServingSettings
) -> ReplicaReport:
    """Bring one replica to the version, whatever it serves; what cannot be done is in the report."""
    steps: list[_Step] = []
    try:
        await _prepare(replica, alias, target, path, steps)
        step = steps[0]
        # Also when it was there already: it may be what failed its proof the last time.
        if target and probe is not None and (step.loaded or step.previous != step.target):
            await _prove(step, probe, settings.probe_tolerance)
        if step.previous != step.target:
            await replica.flip(alias, step.target, step.previous, path)
        return ReplicaReport(replica.url, step.previous, step.loaded, step.previous != step.target, step.probe)
    except ServeError as error:
        return ReplicaReport(replica.url, steps[0].previous if steps else "", error=str(error))


async def _prove(step: _Step, probe: Probe, tolerance: float) -> None:
    step.probe = await prove(step.replica, step.target, probe, tolerance)


async def _still_there(step: _Step) -> None:
    """Raise ServeError when the replica has restarted since: its alias would stand for what it does not have."""
    if step.target not in await step.replica.models():
        raise ServeError(
            f"point an alias at {step.target} on {step.replica.url}",
            "the adapter is not loaded there any more: the server has restarted",
            "It is tried again; by hand, deploy again.",
            retryable=True,
        )


async def _undo(steps: list[_Step], alias: str) -> list[str]:
    """Point every replica back at what it served; what could not be put back, in words."""
    left = []
    for step in steps:
        try:
            if step.flip_tried:
                # A flip whose answer was lost may have happened, so the server is asked.
                if (await step.replica.alias(alias)).target == step.target != step.previous:
                    await step.replica.flip(alias, step.previous, step.target, step.previous_path)
            elif step.loaded:
                # Never pointed at here, so nothing uses it. Elsewhere it stays until it is retired.
                await step.replica.unload(step.target)
        except ServeError as error:
            if step.flip_tried:
                left.append(f"{step.replica.url} may still answer with {step.target}: {error}")
            else:
                log.warning("after a swap that failed: %s", error)
    return left


async def _every(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first error once every call has ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
