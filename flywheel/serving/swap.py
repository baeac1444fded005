"""The swap: an adapter is loaded on every replica, proven on every replica, and only then does the alias move.

Until the last replica has it the old version serves, and whatever goes wrong before leaves it serving. What is
deployed is the caller's to remember; adapters' directories are never touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flywheel.config import ServingSettings
from flywheel.errors import FlywheelError, ServeError
from flywheel.round import AdapterRef, Probe
from flywheel.serving.client import QUICK_SECONDS, Alias, Replica, every
from flywheel.serving.condition import Condition
from flywheel.serving.inspection import if_healthy
from flywheel.serving.probe import ProbeFigures, prove
from flywheel.serving.report import ReplicaReport, RollbackError, SwapReport
from flywheel.states import DeploymentState

log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[object]]
"""Raises ServeError when the files of the adapter must not be loaded."""
Proven = tuple[str, str]
"""What a replica was shown to answer with, and which start of its server that was."""


class OnState(Protocol):
    """Is told how far a swap has come; with `active`, also what was done. What it raises takes the swap back."""

    async def __call__(self, state: DeploymentState, report: SwapReport | None = None, /) -> None: ...


@dataclass(slots=True)
class _Step:
    """How far the swap has come on one replica."""

    replica: Replica
    before: Alias
    target: str
    loaded: bool
    probe: ProbeFigures | None = None
    flip_tried: bool = False

    @property
    def moves(self) -> bool:
        """Whether the alias has to be pointed elsewhere than it was."""
        return self.before.target != self.target

    async def flip(self, alias: str, adapter: AdapterRef | None) -> None:
        path, sha256 = (adapter.path, adapter.sha256) if adapter else (None, None)
        await self.replica.flip(alias, self.target, self.before.target, path, sha256)

    def report(self) -> ReplicaReport:
        """That all was done."""
        return ReplicaReport(
            self.replica.url, self.before.target, self.loaded, self.moves, self.probe, serves=self.target
        )


def version_name(alias: str, adapter: str) -> str:
    """Under which name an adapter is served: `my-agent@r0007`. A version's name never gets other weights."""
    return f"{alias}@{adapter}"


def _target(alias: str, adapter: AdapterRef | None) -> str:
    return version_name(alias, adapter.name) if adapter else ""


async def swap(
    replicas: Sequence[Replica],
    alias: str,
    adapter: AdapterRef | None,
    probe: Probe | None,
    settings: ServingSettings,
    on_state: OnState,
) -> SwapReport:
    """Let `alias` answer with `adapter` (None: the base model) on every replica, or on none.

    `on_state` is told of loading, probing, and active or failed. Raises ServeError, and whatever `on_state` raised,
    after everything was put back; the error names what could not be.
    """
    target = _target(alias, adapter)
    steps: list[_Step] = []
    try:
        await on_state(DeploymentState.LOADING)
        await every([_prepare(replica, alias, adapter, steps) for replica in replicas])
        await on_state(DeploymentState.PROBING)
        if target and probe is not None:
            await every([_prove(step, probe, settings.probe_tolerance) for step in steps])
        if target:
            await every([_still_there(step) for step in steps])
        for step in steps:
            step.flip_tried = True
            await step.flip(alias, adapter)
        by_url = {step.replica.url: step for step in steps}
        report = SwapReport(alias, target, tuple(by_url[replica.url].report() for replica in replicas))
        await on_state(DeploymentState.ACTIVE, report)
    except BaseException as error:
        # Shielded: a stop of the daemon in the middle must not leave the replicas with different versions.
        left = await asyncio.shield(_undo(steps, alias))
        await on_state(DeploymentState.FAILED)
        if left and isinstance(error, FlywheelError):
            raise ServeError(error.attempted, f"{error.why}; moreover, {'; '.join(left)}", error.hint) from error
        for what in left:
            log.error("after a swap that was stopped: %s", what)
        raise
    return report


async def rollback(
    replicas: Sequence[Replica], alias: str, adapter: AdapterRef | None, settings: ServingSettings
) -> SwapReport:
    """Go back to a version that has served before (None: the base model), at once, wherever that is possible.

    Unlike a swap it does not wait for the slowest: a replica that cannot be reached keeps none of the others from
    going back. Raises RollbackError, naming those, when it has done what it could or is stopped while it waits.
    """
    going = [asyncio.create_task(_restore(each, alias, adapter, None, settings)) for each in replicas]
    stopped = None
    try:
        await asyncio.wait(going)
    except asyncio.CancelledError as stop:
        stopped = stop
        for task in going:
            task.cancel()
        await asyncio.wait(going)
    reports = [
        _unanswered(each) if task.cancelled() else task.result() for each, task in zip(replicas, going, strict=True)
    ]
    report = SwapReport(alias, _target(alias, adapter), tuple(reports))
    if stopped and len(report.errors) == len(replicas):
        raise stopped
    if report.errors:
        raise RollbackError(report)
    return report


async def reconcile(
    replicas: Sequence[Replica],
    alias: str,
    adapter: AdapterRef | None,
    probe: Probe | None,
    settings: ServingSettings,
    check: Check | None = None,
    proven: MutableMapping[str, Proven] | None = None,
) -> SwapReport:
    """Bring replicas back to what is deployed: a restarted server has forgotten its adapters.

    `check` is asked before the adapter's files are loaded again. `proven` is what was proven last, by URL, kept
    as it changes: what a server has served since its start, with whatever base model and precision, is proven once.
    Raises nothing for a replica that cannot be brought back: its report says why. Not to be run during a swap.
    """

    async def bring_back(replica: Replica) -> ReplicaReport:
        return await if_healthy(replica, await _restore(replica, alias, adapter, probe, settings, check, proven))

    reports = await asyncio.gather(*map(bring_back, replicas))
    return SwapReport(alias, _target(alias, adapter), tuple(reports))


def _unanswered(replica: Replica) -> ReplicaReport:
    error = f"{replica.url}: stopped before it had answered."
    return ReplicaReport(replica.url, error=error, condition=Condition.UNREACHABLE)


async def _prepare(
    replica: Replica, alias: str, adapter: AdapterRef | None, steps: list[_Step], check: Check | None = None
) -> None:
    before = await replica.alias(alias)
    step = _Step(replica, before, _target(alias, adapter) or before.base_model, loaded=False)
    steps.append(step)
    if adapter is None:
        return
    if check is not None and not await replica.has(step.target, adapter.path):
        await check()
    step.loaded = await replica.load(step.target, adapter.path)


async def _restore(
    replica: Replica,
    alias: str,
    adapter: AdapterRef | None,
    probe: Probe | None,
    settings: ServingSettings,
    check: Check | None = None,
    proven: MutableMapping[str, Proven] | None = None,
) -> ReplicaReport:
    """Bring one replica to the version, whatever it serves; what cannot be done is in the report."""
    steps: list[_Step] = []
    try:
        await _prepare(replica, alias, adapter, steps, check)
        step = steps[0]
        state = (step.target, step.before.instance)
        if adapter is not None and probe is not None:
            # Also when it was there already: it may be what failed its proof the last time.
            if step.loaded or step.moves:
                await _prove(step, probe, settings.probe_tolerance)
            elif proven is not None and step.before.instance and proven.get(replica.url) != state:
                await _prove_soon(step, probe, settings.probe_tolerance)
        if proven is not None:
            proven[replica.url] = state
        if step.moves or _lacks_digest(step.before, adapter):
            await step.flip(alias, adapter)
        return step.report()
    except ServeError as error:
        wanted = steps[0].target if steps else ""
        return ReplicaReport.failed(replica.url, error, serves=steps[0].before.target if steps else "", wanted=wanted)


def _lacks_digest(before: Alias, adapter: AdapterRef | None) -> bool:
    """Whether the server could not tell at its next start that the adapter's files are others: an earlier version
    pointed the alias there."""
    return adapter is not None and before.sha256 not in (None, adapter.sha256)


async def _prove(step: _Step, probe: Probe, tolerance: float) -> None:
    step.probe = await prove(step.replica, step.target, step.before.base_model, probe, tolerance)
    if step.probe.doubt:
        log.warning("%s on %s passes, but it is %s", step.target, step.replica.url, step.probe.doubt)


async def _prove_soon(step: _Step, probe: Probe, tolerance: float) -> None:
    """The same of what serves already: while that takes, nothing else can be done with the servers."""
    try:
        async with asyncio.timeout(QUICK_SECONDS):
            await _prove(step, probe, tolerance)
    except TimeoutError:
        raise ServeError(
            f"prove {step.target} on {step.replica.url}",
            f"its engine gave no answer within {QUICK_SECONDS:g} s",
            "See whether the server is overloaded or hangs; it is asked again.",
            retryable=True,
        ).of_condition(Condition.UNREACHABLE) from None


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
                if step.moves and (await step.replica.alias(alias)).target == step.target:
                    before = step.before
                    await step.replica.flip(alias, before.target, step.target, before.path, before.sha256 or None)
            elif step.loaded:
                # Never pointed at here, so nothing uses it. Elsewhere it stays until it is retired.
                await step.replica.unload(step.target)
        except ServeError as error:
            if step.flip_tried:
                left.append(f"{step.replica.url} may still answer with {step.target}: {error}")
            else:
                log.warning("after a swap that failed: %s", error)
    return left
