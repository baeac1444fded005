"""The Ray session of a round: start, placement of actors, and complete clean-up after success or failure.

Processes are ended by their ids; processes of others are never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flywheel.config.file import Config
from flywheel.config.training import RaySettings
from flywheel.errors import FlywheelError, ProcessLostError, TrainError
from flywheel.secrets import URL_USERS
from flywheel.serving.adapter_files import WEIGHTS_FILE
from flywheel.system import log as logs
from flywheel.system.process_folder import ProcessFolder
from flywheel.system.signals import POLL_SECONDS, check_stopped
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.engine.gpu_placement import GpuPlacement, GpuShare
from flywheel.training.engine.lost_engines import leave_out
from flywheel.training.engine.policy import AdapterFiles, base_dtype, check_base
from flywheel.training.program.agent_program import in_copy

KILL_SECONDS = 5.0
log = logging.getLogger(__name__)


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill these processes, each by its id and start time, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=KILL_SECONDS)
    for process in alive:
        log.error("process %d would not end", process.pid)


class RoundActor:
    """Base class of actors. Call `join` first."""

    def join(self, environment: Mapping[str, str], base_model: str, files: Sequence[str], sent: str) -> None:
        """Set these variables, and log as the worker does. Check that this node has the base model and these files,
        those below the folder `sent` in Ray's copy of it. Raises TrainError.

        Secrets are passed here and not in the actor's runtime environment, which a cluster's dashboard shows.
        """
        os.environ.update(environment)
        logs.setup()
        attempted = f"start the round on the node {socket.gethostname()}"
        try:
            check_base(base_model)
            base_dtype(base_model)
        except TrainError as error:
            hint = "All nodes must find model.base: at the same path, or by its name on the hub."
            raise TrainError(attempted, f"base model {base_model}: {error.why}", hint) from error
        here = [in_copy(path, sent, str(Path.cwd())) for path in files]
        if missing := [path for path in here if not Path(path).exists()]:
            hint = (
                "Name the folder of your agent in ray.working_dir, or put its files at the same paths on all nodes."
            )
            raise TrainError(attempted, f"it has no {', no '.join(missing)}", hint)


T = TypeVar("T")

LOST: Final = (RayActorError, ObjectLostError)
"""What Ray raises for calls of a process that died, and for results that were on a node that is gone."""
OBJECT_STORE_BYTES = 1 << 30
"""At most; memory is taken as it is used. Adapters pass through it, the next one of a step when the one before is
gone: of rank 16 for a 4B model, 132 MB each. Rollouts are small."""
SHORT_PATH = 20
"""Longest parent of Ray's directory. A socket's path has at most 107 characters, of which `/fw-process-XXXXXXXX`, the
session's name and `/sockets/plasma_store` take up to 86."""
GRACE_SECONDS = 8.0
CONNECT_SECONDS = 30.0
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Otherwise vLLM pins its threads to cores that the trainer and the agent's server also use.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that spin while they wait take the cores from the threads that they wait for: on a busy machine, a
    # training step took five times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    # By itself, Ray keeps objects that are not needed any more for a second: at the pace of a checkpoint's pieces,
    # hundreds of megabytes.
    "RAY_free_objects_period_milliseconds": "0",
}


CARRIED = frozenset(
    {
        *(URL_USERS, "OPENAI_BASE_URL", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *(f"{name}_proxy" for name in ("http", "https", "no", "all")),
        *(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "NO", "ALL")),
    }
)
CARRIED_PREFIXES = ("HF_", "VLLM_", "NCCL_", "TRANSFORMERS_", "PYTORCH_", "TORCH_")


@contextlib.contextmanager
def session(settings: Config) -> Iterator[None]:
    """Ray for the length of a round: a cluster by address, else a local one on the loopback interface.

    At the end of a local one, every process is killed that this process has started since."""
    directory = None
    before = set(psutil.Process().children(recursive=True))
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    try:
        if settings.ray.address:
            _connect(settings.ray)
        else:
            # A token for this session only; by default Ray writes one for all sessions into the user's home.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            parent = tempfile.gettempdir()
            # Its logs, and what it spills, can have texts.
            directory = ProcessFolder(Path(parent if len(parent) <= SHORT_PATH else "/tmp"))
            ray.init(
                address="local",
                num_cpus=settings.rollout.engines + settings.training.workers,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(directory.path),
                configure_logging=False,
            )
        yield
    finally:
        # Take the snapshot first: processes that die later are still in it, and orphans are adopted by this process.
        ours = set() if settings.ray.address else {*psutil.Process().children(recursive=True)} - before
        with contextlib.suppress(Exception):
            ray.shutdown()
        if not settings.ray.address:
            end_processes([*ours, *({*psutil.Process().children(recursive=True)} - before)])
        if directory is not None:
            directory.remove()


def _connect(settings: RaySettings) -> None:
    address = settings.address or ""
    runtime_env: dict[str, Any] = {"env_vars": ENVIRONMENT}
    if settings.working_dir is not None:
        runtime_env["working_dir"] = str(settings.working_dir)
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "/" not in host:
            # Otherwise Ray retries for many minutes to reach an address where nothing listens.
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, configure_logging=False, runtime_env=runtime_env)
    except (OSError, RuntimeError, ValueError) as error:
        raise TrainError(
            f"reach the Ray cluster at {address}",
            " ".join(str(error).split())[:300],
            "Check ray.address and ray.working_dir, or leave them out for a local one.",
            retryable=True,
        ) from error


def start(kind: type, *arguments: Any, gpus: float, within: Any = None) -> Any:
    """An actor of that class with so much of a GPU, or so many (0: none); `within` is where, see `Places.at`."""
    options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": within}
    return ray.remote(kind).options(**options).remote(*arguments)


def gpus() -> int:
    """Those of the whole cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


class Places:
    """Placement of all processes of a round, reserved together and released with the session."""

    def __init__(self, placement: GpuPlacement, seconds: float) -> None:
        """Raises TrainError when the resources are not available within `seconds`."""
        self._wanted = [
            {"CPU": float(number), **({"GPU": float(whole)} if (whole := placement.gpus(place)) else {})}
            for place, number in enumerate(placement.occupied)
        ]
        self._group = placement_group(self._wanted, strategy="PACK")
        end = time.monotonic() + seconds
        while not self._group.wait(POLL_SECONDS):
            check_stopped()
            if time.monotonic() >= end:
                refusal = self._refusal(seconds)
                remove_placement_group(self._group)
                raise refusal

    def at(self, gpu_share: GpuShare) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=gpu_share.place)

    def _refusal(self, seconds: float) -> TrainError:
        counts = Counter(_resources_text(wanted) for wanted in self._wanted)
        asked = ", ".join(f"{number} × ({wanted})" for wanted, number in counts.items())
        nodes = ", ".join(_resources_text(node["Resources"]) for node in ray.nodes() if node["Alive"])
        return TrainError(
            "place the round's processes in the Ray cluster",
            f"there was no room within {seconds:g} s. Asked for, each on one node: {asked}. Free in all of the"
            f" cluster: {_resources_text(ray.available_resources())}. What its nodes have, free or not: {nodes}",
            "Free some of it, set rollout.engines, rollout.tensor_parallel or training.workers lower, or raise"
            " ray.placement_seconds.",
            retryable=True,
        )


def _resources_text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("GPU", "CPU"))


def gather(
    engines: Sequence[Any], others: Sequence[Any], settings: Config, base_model: str, files: Sequence[str] = ()
) -> None:
    """Give actors the worker's environment, including secrets, and check that each node has the base model, and those
    of engines these files of the user's agent.

    Raises TrainError with the node and what it lacks.
    """
    needed = [*((engine, list(files)) for engine in engines), *((other, []) for other in others)]
    environment, sent = _carried(settings), str(settings.ray.working_dir or "")
    wait([member.join.remote(environment, base_model, own, sent) for member, own in needed])


def _carried(settings: Config) -> dict[str, str]:
    """The variables of this process's environment that its actors need on any node."""
    rollout = settings.rollout
    models = (settings.judge, settings.judge.backup, *rollout.auxiliary_models.values())
    keys = {*rollout.agent_environment, *(model.api_key_env for model in models if model is not None)}
    return {
        name: value
        for name, value in os.environ.items()
        if name in keys or name in CARRIED or name.startswith(CARRIED_PREFIXES)
    }


def cpu_threads() -> int:
    """Threads for a process that computes on the CPU. Engines and trainer take turns, so each may use all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait(references: Sequence[Any]) -> list[Any]:
    """The results. Raises Stopped when a signal stops the worker first; an actor's FlywheelError is raised
    unchanged."""
    pending = list(references)
    while pending:
        check_stopped()
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        for reference in ready:
            _get(reference)
    return [_get(reference) for reference in references]


def on_all(actors: Sequence[Any], method: str, *arguments: Any) -> Any:
    """Call a method on actors that work together, see `result_of_all`."""
    return result_of_all([getattr(actor, method).remote(*arguments) for actor in actors])


def result_of_all(calls: Sequence[Any]) -> Any:
    """The result of the first of some calls of actors that work together. Raises like `wait`, also when another one
    fails."""
    try:
        return wait(calls)[0]
    except RuntimeError:
        # Where one has died, the error of another may come first: that it cannot be reached.
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=GRACE_SECONDS)
        for call in ended:
            with contextlib.suppress(RuntimeError):
                _get(call)
        raise


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        while cause is not None and not isinstance(cause, FlywheelError):
            cause = cause.cause if isinstance(cause, RayTaskError) else cause.__cause__
        if cause is None:
            raise error.cause from error
        raise cause from None
    except LOST as error:
        raise _died("run the round", "a process of it", error) from error


def _died(attempted: str, what: str, error: BaseException) -> ProcessLostError:
    return ProcessLostError(
        attempted,
        f"{what} died ({' '.join(str(error).split())[:300]})",
        "The worker's log has the cause; often memory ran out. The round can be started again.",
        retryable=True,
    )


def load(engines: list[Any], name: str, number: int, files: AdapterFiles) -> LoadedAdapter:
    """Load an adapter on every engine, under a name and a number that are used once. Raises as `everywhere`."""
    adapter = LoadedAdapter(name, number, files.sha256[WEIGHTS_FILE])
    shared = ray.put(files)
    everywhere(engines, lambda engine: engine.load.remote(adapter, shared))
    return adapter


def everywhere(engines: list[Any], call: Callable[[Any], Any]) -> list[Any]:
    """The results of a call of each engine, without those of engines that are lost. Raises TrainError if none is
    left, and Stopped."""
    found = []
    for engine, reference in [(engine, call(engine)) for engine in engines]:
        try:
            found += wait([reference])
        except ProcessLostError as error:
            leave_out(engines, engine, error)
    return found


def anywhere(engines: list[Any], use: Callable[[Any], T]) -> T:
    """The result of using the first engine, or the next one if it is lost meanwhile. Raises as `everywhere`."""
    while True:
        engine = engines[0]
        try:
            return use(engine)
        except ProcessLostError as error:
            leave_out(engines, engine, error)


def stop(engines: Sequence[Any]) -> None:
    """Ask engines to end their own processes; those that do not answer in time are killed with the session."""
    with contextlib.suppress(Exception):
        ray.wait([engine.stop.remote() for engine in engines], num_returns=len(engines), timeout=GRACE_SECONDS)


class RayCalls:
    """Calls of engines that are actors."""

    def submit(self, engine: Any, request: RolloutRequest) -> Any:
        return engine.generate.remote(request)

    def ended(self, calls: Sequence[Any], *, seconds: float) -> list[Any]:
        # Without a wait, all that have ended.
        ready, _ = ray.wait(list(calls), num_returns=1 if seconds else len(calls), timeout=seconds)
        return list(ready)

    def completion(self, call: Any) -> Completion:
        try:
            completion: Completion = ray.get(call)
        except LOST as error:
            raise _died("generate rollouts", "a rollout engine", error) from error
        except RayTaskError as error:
            if "EngineDead" in type(error.cause).__name__:
                raise _died("generate rollouts", "a rollout engine", error.cause) from error
            log.warning("one rollout failed: %s", error.cause)
            return Completion(error=f"the engine failed: {error.cause}")
        if completion.token_ids or completion.error:
            return completion
        return Completion(error="the engine returned no token")

    def cancel(self, call: Any) -> None:
        ray.cancel(call)
