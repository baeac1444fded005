"""The swap: load an adapter on every replica, verify it on every replica, and only then move the alias.

Until the last replica has it, the old version serves, and it keeps serving after any failure. Versions that are no
longer needed are unloaded before it, for a free slot, and after it. Both versions of an A/B test are treated alike.
The caller records what is deployed; adapters' directories are never changed.

A rollback does not wait for a process that swaps: it may be stopped, or hang. That process must not move an alias
afterwards, whenever it goes on, so every change of an alias takes three steps in this order: read its revision on the
server; ask the `fence` whether the state still lets this process change it; set it, if the revision is still that
one. A rollback is recorded in the state, which closes the fences of others, before its own first step. Of a replica:

- The other process asks its fence after that: it is refused.
- It asked before, and sets the alias after the rollback did: the revision is another one, and the server refuses it,
  also if the target is the same as before, or is so again after later swaps.
- It asked before, and sets the alias between the rollback's reading and setting: the rollback is refused, and begins
  with reading again; the other process has at most this one change for which it had asked.
- It had set the alias before: the rollback reads what it set, and sets its own target. When the other process takes
  its change back, it does so only if the alias's revision is that of its own change.

Of two rollbacks, the later one has closed the fence of the earlier one. An adapter that the rollback points at cannot
be unloaded, as the server refuses that for the target of an alias; if it was unloaded before, it is loaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flywheel.errors import Condition, FlywheelError, ServeError
from flywheel.records.round import AdapterRef, Probe
from flywheel.records.states import DeploymentState
from flywheel.serving.alias_target import ABTest, AliasTarget, version_names
from flywheel.serving.client.replica_client import Alias, AliasChangedError, Replica, every
from flywheel.serving.client.weight_verification import ProbeFigures, prove

T = TypeVar("T")
HasLeft = Callable[[Replica], Awaitable[bool]]
"""Whether a replica that has failed is none any more (a pod that was removed)."""
log = logging.getLogger(__name__)
ROLLBACK_ATTEMPTS = 4
"""How often a rollback sets the alias of a replica that another process sets meanwhile."""
PROVE_SECONDS = 60.0
"""Timeout in seconds for verifying what serves already."""


async def _stays(_: Replica) -> bool:
    return False


async def _is_there(replica: Replica, call: Coroutine[Any, Any, object], has_left: HasLeft) -> bool:
    """Run a call on a replica; False if it failed because the replica has left. Raises ServeError otherwise."""
    try:
        await call
    except ServeError as error:
        if not await has_left(replica):
            raise
        log.info("%s is gone; the swap continues without it: %s", replica.url, error)
        return False
    return True


async def _present(calls: Mapping[Replica, Coroutine[Any, Any, object]], has_left: HasLeft) -> list[Replica]:
    """Run a call on each replica; those that have not left. Raises the first error of one of these, after every call
    has ended."""
    are_there = await every([_is_there(*each, has_left) for each in calls.items()])
    return _some([replica for replica, is_there in zip(calls, are_there, strict=True) if is_there])


def _some(left: list[T]) -> list[T]:
    if not left:
        why = "all replicas of serving.urls have gone meanwhile"
        raise ServeError("find a replica", why, "It is retried when replicas are available.", retryable=True)
    return left


async def ask(replicas: Sequence[Replica], alias: str, has_left: HasLeft = _stays) -> list[Replica]:
    """The replicas that have not left. Raises ServeError when one of them cannot report what it serves."""
    return await _present({replica: replica.alias(alias) for replica in replicas}, has_left)


async def look(replicas: Sequence[Replica], alias: str) -> SwapReport:
    """Reports on replicas before anything was deployed: servers that wait are told that the base model answers, and
    nothing else is changed. Raises nothing."""

    async def look_at(replica: Replica) -> ReplicaReport:
        try:
            found = await replica.alias(alias)
            if found.waiting and found.target == found.base_model:
                await replica.point(alias, found.target, found.target)
        except ServeError as error:
            return ReplicaReport.failed(replica.url, error)
        if found.target != found.base_model:
            unknown = ServeError(
                f"account for {found.target} on {replica.url}",
                f"{alias} stands for it there, and by this state nothing was ever deployed",
                "If another state deployed it, set state.dir to that one; else let the base model answer: "
                "`flywheel deploy base`.",
            )
            return ReplicaReport.failed(replica.url, unknown, serves=found.serves, wanted=found.base_model)
        return await if_healthy(replica, ReplicaReport(replica.url, found.target, serves=found.target))

    return SwapReport(alias, "", tuple(await asyncio.gather(*map(look_at, replicas))))


async def if_healthy(replica: Replica, report: ReplicaReport) -> ReplicaReport:
    """The report; for a replica whose engine is dead, that condition."""
    if report.error or not await replica.is_down():
        return report
    error = ServeError(f"use {replica.url}", "it is not healthy", "Look at its log; restart it if its engine died.")
    return dataclasses.replace(report, error=str(error), condition=Condition.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The result on one replica.

    `previous` is the model that answered before, `serves` the one that answers now, both empty if unknown or none;
    `error` is the reason why nothing was done.
    """

    url: str
    previous: str = ""
    loaded: bool = False
    pointed: bool = False
    probe: ProbeFigures | None = None
    error: str = ""
    serves: str = ""
    condition: str = Condition.OK

    @classmethod
    def failed(cls, url: str, error: ServeError, *, serves: str = "", wanted: str = "") -> ReplicaReport:
        """A replica without a change, which still `serves` another model than the `wanted` one."""
        is_known = error.condition != Condition.FAILING
        condition = Condition.WRONG_ADAPTER if serves != wanted and not is_known else error.condition
        return cls(url, serves, error=str(error), serves=serves, condition=condition)


@dataclass(frozen=True, slots=True)
class SwapReport:
    """The results on all replicas. `target` is the served name of the version, empty for the base model."""

    alias: str
    target: str
    replicas: tuple[ReplicaReport, ...]

    @property
    def changed(self) -> tuple[ReplicaReport, ...]:
        return tuple(replica for replica in self.replicas if replica.loaded or replica.pointed)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(replica.error for replica in self.replicas if replica.error)

    @property
    def any_followed(self) -> bool:
        """Whether a replica has no error."""
        return any(not replica.error for replica in self.replicas)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class RollbackError(ServeError):
    """Some replicas did not go back; `report` names them."""

    def __init__(self, report: SwapReport) -> None:
        self.report = report
        super().__init__(
            f"roll {report.alias} back to {report.target or 'the base model'} on every replica",
            " ".join(report.errors),
            "The others have it. The daemon brings these there when they answer again; without it, roll back again."
            if report.any_followed
            else "Nothing was changed. Fix this, then roll back again.",
            retryable=True,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.report,))


Check = Callable[[AdapterRef], Awaitable[object]]
"""Raises ServeError when the files of the adapter must not be loaded."""
Fence = Callable[[], Awaitable[object]]
"""Raises FlywheelError when this process may no longer change the alias."""
Proven = MutableMapping[tuple[str, str], str]
"""The start of the server at which a version was verified last, by URL and served name."""


class OnState(Protocol):
    """Called with each state of a swap; with `active`, also with its report. An exception reverts the swap."""

    async def __call__(self, state: DeploymentState, report: SwapReport | None = None, /) -> None: ...


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """The other version of an A/B test (see `ABTest`): `share` of the units go to the one that is deployed, the rest
    to this one. Without an adapter it is the base model."""

    adapter: AdapterRef | None
    probe: Probe | None
    share: float
    salt: str

    def ab_test(self, alias: str, base_model: str) -> ABTest:
        name = _target(alias, self.adapter) or base_model
        path, sha256 = (self.adapter.path, self.adapter.sha256) if self.adapter else (None, None)
        return ABTest(AliasTarget(name, path, sha256), self.share, self.salt)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What an alias is to stand for on each replica, and what is asked before and while it is brought there."""

    alias: str
    adapter: AdapterRef | None
    probe: Probe | None = None
    other: OtherVersion | None = None
    check: Check | None = None
    fence: Fence | None = None
    proven: Proven | None = None

    @property
    def versions(self) -> list[tuple[AdapterRef | None, Probe | None]]:
        return [(self.adapter, self.probe), *([(self.other.adapter, self.other.probe)] if self.other else [])]


@dataclass(slots=True)
class _Step:
    """The progress of the swap on one replica. `serves` is what answers there, in an A/B test the new version;
    `absent` are the versions that were not loaded, and `loaded` those of them that are now."""

    replica: Replica
    wanted: _Wanted
    before: Alias
    target: str
    ab_test: ABTest | None
    serves: str
    absent: set[str] = dataclasses.field(default_factory=set)
    loaded: set[str] = dataclasses.field(default_factory=set)
    probe: ProbeFigures | None = None
    point_tried: bool = False

    @property
    def moves(self) -> bool:
        """Whether the alias must be changed."""
        return (self.before.target, self.before.ab_test) != (self.target, self.ab_test)

    @property
    def names(self) -> list[str]:
        """The served names of the versions."""
        return version_names(self.target, self.ab_test)

    def is_new(self, name: str) -> bool:
        """Whether the version does not serve there yet."""
        return name in self.absent or name not in self.before.versions or name == self.before.missing

    async def load(self, name: str, adapter: AdapterRef) -> None:
        if await self.replica.has(name, adapter.path, adapter.sha256):
            return
        self.absent.add(name)
        if self.wanted.check is not None:
            await self.wanted.check(adapter)
        if await self.replica.load(name, adapter.path, adapter.sha256):
            self.loaded.add(name)

    async def point(self, missing: str = "") -> None:
        adapter = self.wanted.adapter
        path, sha256 = (adapter.path, adapter.sha256) if adapter else (None, None)
        if self.wanted.fence is not None:
            await self.wanted.fence()
        named, revision = (self.wanted.alias, self.target, self.before.target, path, sha256), self.before.revision
        await self.replica.point(*named, ab_test=self.ab_test, missing=missing, revision=revision)
        self.serves = next(name for name in self.names if name != missing)

    def is_own(self, now: Alias) -> bool:
        """Whether this step made the alias what it is `now`."""
        revision = self.before.revision
        return now.target == self.target and (revision is None or now.revision == revision + 1)

    def report(self) -> ReplicaReport:
        """Mark the swap as complete."""
        return ReplicaReport(
            self.replica.url, self.before.serves, bool(self.loaded), self.moves, self.probe, serves=self.target
        )


def version_name(alias: str, adapter: str) -> str:
    """The served name of an adapter: `my-agent@r0007`. A name always stands for the same weights."""
    return f"{alias}@{adapter}"


def _target(alias: str, adapter: AdapterRef | None) -> str:
    return version_name(alias, adapter.name) if adapter else ""


async def swap(
    replicas: Sequence[Replica],
    alias: str,
    adapter: AdapterRef | None,
    probe: Probe | None,
    on_state: OnState,
    other: OtherVersion | None = None,
    check: Check | None = None,
    fence: Fence | None = None,
    has_left: HasLeft = _stays,
) -> SwapReport:
    """Point `alias` to `adapter` (None: the base model) on every replica or on none; with `other`, begin an A/B test.

    A replica that fails and `has_left` meanwhile is left out. `on_state` is called for loading, probing, and active
    or failed; `check` before an adapter's files are loaded. Raises ServeError, and any exception of `on_state`, after
    everything was restored; the error names what could not be restored.
    """
    wanted, target = _Wanted(alias, adapter, probe, other, check, fence), _target(alias, adapter)
    steps: list[_Step] = []

    async def at_each(call: Callable[[_Step], Coroutine[Any, Any, object]]) -> None:
        here = await _present({step.replica: call(step) for step in steps}, has_left)
        steps[:] = [step for step in steps if step.replica in here]

    try:
        await on_state(DeploymentState.LOADING)
        here = await _present({each: _prepare(each, wanted, steps) for each in replicas}, has_left)
        steps[:] = sorted((step for step in steps if step.replica in here), key=lambda step: here.index(step.replica))
        await on_state(DeploymentState.PROBING)
        if target and probe is not None:
            await at_each(lambda step: _prove(step, step.target, probe))
        if other is not None and (recorded := other.probe) is not None:
            await at_each(lambda step: _prove_other(step, recorded))
        await at_each(_still_there)
        for step in list(steps):
            step.point_tried = True
            if not await _is_there(step.replica, step.point(), has_left):
                steps.remove(step)
        report = SwapReport(alias, target, tuple(step.report() for step in _some(steps)))
        await on_state(DeploymentState.ACTIVE, report)
    except BaseException as error:
        # Shielded: stopping the daemon meanwhile must not leave replicas with different versions.
        left = await asyncio.shield(_undo(steps))
        await on_state(DeploymentState.FAILED)
        if left and isinstance(error, FlywheelError):
            raise ServeError(error.attempted, f"{error.why}; moreover, {'; '.join(left)}", error.hint) from error
        for what in left:
            log.error("after a swap that was stopped: %s", what)
        raise
    return report


async def rollback(
    replicas: Sequence[Replica],
    alias: str,
    adapter: AdapterRef | None,
    check: Check | None = None,
    fence: Fence | None = None,
) -> SwapReport:
    """Return to one version that has served before (None: the base model) on every reachable replica.

    An A/B test ends. Unlike a swap, an unreachable replica does not prevent the others from going back. `check` is
    called before the adapter's files are loaded, if they are not. Raises RollbackError, which names the replicas that
    did not follow, at the end or when it is stopped while it waits, and what `fence` raises.
    """
    wanted = _Wanted(alias, adapter, check=check, fence=fence)
    going = [asyncio.create_task(_restore(each, wanted, ROLLBACK_ATTEMPTS)) for each in replicas]
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
    check: Check | None = None,
    proven: Proven | None = None,
    other: OtherVersion | None = None,
    fence: Fence | None = None,
) -> SwapReport:
    """Restore the deployed adapter, and the `other` version of an A/B test, on replicas, for example after a restart.

    `check` is called before an adapter's files are loaded again. `proven` has the last verified states and is
    updated: what a server has served since its start is verified once. Raises nothing for a replica that cannot be
    restored; its report says why, and of an A/B test it serves the version that it has. Must not run during a swap.
    """
    wanted = _Wanted(alias, adapter, probe, other, check, fence, proven)

    async def bring_back(replica: Replica) -> ReplicaReport:
        return await if_healthy(replica, await _restore(replica, wanted))

    reports = await asyncio.gather(*map(bring_back, replicas))
    return SwapReport(alias, _target(alias, adapter), tuple(reports))


def _unanswered(replica: Replica) -> ReplicaReport:
    error = f"{replica.url}: stopped before it had answered."
    return ReplicaReport(replica.url, error=error, condition=Condition.UNREACHABLE)


async def _begin(replica: Replica, wanted: _Wanted, steps: list[_Step]) -> _Step:
    before = await replica.alias(wanted.alias)
    ab_test = wanted.other.ab_test(wanted.alias, before.base_model) if wanted.other else None
    target = _target(wanted.alias, wanted.adapter) or before.base_model
    steps.append(_Step(replica, wanted, before, target, ab_test, before.serves))
    return steps[-1]


async def _prepare(replica: Replica, wanted: _Wanted, steps: list[_Step]) -> None:
    step = await _begin(replica, wanted, steps)
    for name, (version, _) in zip(step.names, wanted.versions, strict=True):
        if version is not None:
            await step.load(name, version)


async def _restore(replica: Replica, wanted: _Wanted, attempts: int = 0) -> ReplicaReport:
    """Bring one replica to the version, or to both of an A/B test; problems are in the report. A rollback has several
    `attempts`, and sets the alias also if its target stays the same: what others may still send is then refused."""
    steps: list[_Step] = []
    try:
        step, adapter = await _begin(replica, wanted, steps), wanted.adapter
        failed: dict[str, ServeError] = {}
        for name, (version, probe) in zip(step.names, wanted.versions, strict=True):
            try:
                if version is not None:
                    await _bring(step, name, version, probe)
            except ServeError as problem:
                failed[name] = problem
        if len(failed) == len(wanted.versions):
            raise failed[step.target]
        # What serves already keeps its share, as without an A/B test. Only a version that is not there is left out.
        missing = next((name for name in failed if step.is_new(name)), "")
        if step.moves or step.before.waiting or step.before.missing != missing or attempts:
            await step.point(missing)
        if attempts and adapter is not None and await replica.load(step.target, adapter.path, adapter.sha256):
            step.loaded.add(step.target)  # Until now, others may have unloaded it.
        if failed:
            raise next(iter(failed.values()))
        return step.report()
    except ServeError as error:
        if isinstance(error, AliasChangedError) and attempts > 1:
            return await _restore(replica, wanted, attempts - 1)
        target, serves = (steps[0].target, steps[0].serves) if steps else ("", "")
        return ReplicaReport.failed(replica.url, error, serves=serves, wanted=target)


async def _bring(step: _Step, name: str, adapter: AdapterRef, probe: Probe | None) -> None:
    """Load a version on a replica and verify it, if it was not verified since the server started."""
    await step.load(name, adapter)
    proven = step.wanted.proven
    state, instance = (step.replica.url, name), step.before.instance
    if probe is not None:
        # Also if it was loaded before: it may have failed its last verification.
        if step.is_new(name):
            await _prove(step, name, probe)
        elif proven is not None and instance and proven.get(state) != instance:
            await _prove_soon(step, name, probe)
    if proven is not None:
        proven[state] = instance


async def _prove(step: _Step, name: str, probe: Probe) -> None:
    figures = await prove(step.replica, name, step.before.base_model, probe)
    if name == step.target:
        step.probe = figures


async def _prove_other(step: _Step, probe: Probe) -> None:
    """Verify the other version of an A/B test. It serves already, but for a server that has lost it."""
    if step.is_new(name := step.names[1]):
        await _prove(step, name, probe)


async def _prove_soon(step: _Step, name: str, probe: Probe) -> None:
    """Verify the adapter that already serves; no other change of the servers can run meanwhile."""
    try:
        async with asyncio.timeout(PROVE_SECONDS):
            await _prove(step, name, probe)
    except TimeoutError:
        raise ServeError(
            f"prove {name} on {step.replica.url}",
            f"its engine gave no answer within {PROVE_SECONDS:g} s",
            "See whether the server is overloaded or hangs; it is asked again.",
            retryable=True,
        ).of_condition(Condition.UNREACHABLE) from None


async def _still_there(step: _Step) -> None:
    """Raise ServeError when the replica has restarted: its alias would point to an adapter that is not loaded."""
    adapters = set(step.names) - {step.before.base_model}
    if lost := adapters - (await step.replica.models()).keys() if adapters else None:
        raise ServeError(
            f"point an alias at {step.target} on {step.replica.url}",
            f"{' and '.join(sorted(lost))} is no longer loaded there: the server has restarted",
            "The daemon retries; by hand, deploy again.",
            retryable=True,
        )


async def _undo(steps: list[_Step]) -> list[str]:
    """Restore the previous target on every replica. Returns a description of the failures."""
    left = []
    for step in steps:
        try:
            if step.point_tried:
                # A change whose response was lost may have taken effect, so ask the server.
                alias, before = step.wanted.alias, step.before
                now = await step.replica.alias(alias)
                if (step.moves or before.waiting) and step.is_own(now):
                    saved = before.path, before.sha256, before.waiting, before.ab_test, before.missing
                    with contextlib.suppress(AliasChangedError):  # A rollback has set it since.
                        await step.replica.point(alias, before.target, step.target, *saved, now.revision)
            elif step.target in step.loaded:
                # The alias never pointed to it here, so nothing uses it. On other replicas it stays loaded until it
                # is retired.
                await step.replica.unload(step.target)
        except ServeError as error:
            if step.point_tried:
                left.append(f"{step.replica.url} may still answer with {step.target}: {error}")
            else:
                log.warning("after a swap that failed: %s", error)
    return left


async def retire(
    replicas: Sequence[Replica], alias: str, keep: Collection[str], drain_seconds: float
) -> dict[str, list[str]]:
    """Unload versions of `alias` that are no longer needed. Returns the unloaded names per replica.

    `keep` are names of adapters to keep (the deployed one and those to roll back to). The serving versions are always
    kept, and a version is unloaded only after it has not served for `drain_seconds`, so that requests in flight
    complete. Must not run during a swap.
    """

    async def drain(replica: Replica) -> list[str]:
        try:
            return await _retire(replica, alias, keep, drain_seconds)
        except ServeError as error:
            # An adapter that stays loaded costs only memory; the next swap tries again.
            log.warning("old versions stay loaded: %s", error)
            return []

    return dict(zip([r.url for r in replicas], await asyncio.gather(*map(drain, replicas)), strict=True))


async def make_room(
    replicas: Sequence[Replica],
    alias: str,
    adapter: str,
    recent: Collection[str],
    keep: Collection[str],
    drain_seconds: float,
) -> None:
    """Unload versions of `alias` until each replica has a free slot for `adapter`, or nothing more can go.

    First all that are not in `recent`; then, where no slot is free, also those that served until recently, after
    `drain_seconds`; and at last the ones in `keep`, which a rollback loads again. Raises nothing.
    """

    async def free(replica: Replica) -> None:
        try:
            for kept, seconds in ((recent, 0.0), (keep, drain_seconds), ((), drain_seconds)):
                await _retire(replica, alias, {*kept, adapter}, seconds)
                there = await replica.alias(alias)
                adapters = (await replica.models()).keys() - {there.base_model}
                if there.max_adapters is None or len(adapters | {version_name(alias, adapter)}) <= there.max_adapters:
                    break
        except ServeError as error:
            log.warning("old versions stay loaded: %s", error)

    await asyncio.gather(*map(free, replicas))


async def _retire(replica: Replica, alias: str, keep: Collection[str], drain_seconds: float) -> list[str]:
    """Raises ServeError."""
    kept = {version_name(alias, name) for name in keep}

    async def idle() -> set[str]:
        serving = (await replica.alias(alias)).versions
        loaded = [name for name in await replica.models() if name.startswith(version_name(alias, ""))]
        return {name for name in loaded if name not in kept and name not in serving}

    old = await idle()
    if old:
        await asyncio.sleep(drain_seconds)
        old &= await idle()
    return [name for name in sorted(old) if await replica.unload(name)]
