"""The Ray session of a round: started, used, and gone without a trace, whatever happens in between.

Owns processes and placement only. Processes are ended by their ids; those of others are never looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from flywheel.config import Config
from flywheel.errors import FlywheelError, TrainError
from flywheel.training.process import POLL_SECONDS, check_stopped

log = logging.getLogger(__name__)

T = TypeVar("T")

PR_SET_CHILD_SUBREAPER = 36
OBJECT_STORE_BYTES = 100 << 20
"""Rollouts are small and travel inside the calls; this is little more than Ray's minimum."""
SHORT_PATH = 20
"""Longest parent of Ray's directory. A socket's path has at most 107 characters, of which `/fw-PID-XXXXXXXX`, the
session's name and `/sockets/plasma_store` take up to 86."""
GRACE_SECONDS = 8.0
KILL_SECONDS = 5.0
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # vLLM would choose cores for its threads although the trainer and the agent's server use the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that spin while they wait take the cores from those they wait for: with other work on the machine, a
    # training step took five times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process: vLLM's own children outlive an actor that is killed,
    and only descendants can be found again. Linux only; elsewhere such orphans are not found."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def session(settings: Config) -> Iterator[None]:
    """Ray for the length of a round: a cluster by address, else a local one on the loopback interface."""
    directory = None
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    try:
        if settings.ray.address:
            _connect(settings.ray.address)
        else:
            # A token of this session's own; Ray would write one for all sessions into the user's home.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            parent = tempfile.gettempdir()
            directory = tempfile.mkdtemp(
                prefix=f"fw-{os.getpid()}-", dir=parent if len(parent) <= SHORT_PATH else "/tmp"
            )
            ray.init(
                address="local",
                num_cpus=settings.rollout.engines + 1,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=directory,
                configure_logging=False,
            )
        yield
    finally:
        # The snapshot comes first: what dies in between stays in it, what is orphaned is adopted.
        ours = [] if settings.ray.address else psutil.Process().children(recursive=True)
        with contextlib.suppress(Exception):
            ray.shutdown()
        if not settings.ray.address:
            end_processes([*ours, *psutil.Process().children(recursive=True)])
        if directory:
            shutil.rmtree(directory, ignore_errors=True)


def _connect(address: str) -> None:
    try:
        ray.init(address=address, configure_logging=False, runtime_env={"env_vars": ENVIRONMENT})
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise TrainError(
            f"reach the Ray cluster at {address}",
            " ".join(str(error).split())[:300],
            "Check ray.address, or leave it out for a local one.",
            retryable=True,
        ) from error


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill these processes, each by its id and start time, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=KILL_SECONDS)
    for process in alive:
        log.error("process %d would not end", process.pid)


def start(kind: type, *arguments: Any, gpus: float) -> Any:
    """An actor of that class with its share of a GPU (0: none)."""
    return ray.remote(kind).options(num_cpus=1, num_gpus=gpus).remote(*arguments)


def gpu_share(engines: int) -> float:
    """The share of a GPU for each engine and the trainer: whole ones while they last, else equal parts."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0:
        return 0.0
    sharing = math.ceil((engines + 1) / gpus)
    # Rounded down, so that the parts fit.
    return math.floor(100 / sharing) / 100


def cpu_threads() -> int:
    """Threads for a process that computes on the CPU. Engines and trainer take turns, so each may use all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait(references: Sequence[Any]) -> list[Any]:
    """The results, unless a signal stops the worker first. An actor's FlywheelError comes out as it was raised."""
    pending = list(references)
    while pending:
        check_stopped()
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        for reference in ready:
            _get(reference)
    return [_get(reference) for reference in references]


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
    except RayActorError as error:
        raise _died(error) from error


def _died(error: RayActorError) -> FlywheelError:
    return TrainError(
        "run the round",
        f"a process of it died ({' '.join(str(error).split())[:300]})",
        "The worker's log has the cause; often memory ran out. The round can be started again.",
        retryable=True,
    )


def stop(engines: Sequence[Any]) -> None:
    """Let engines end their own processes; what does not answer in time is killed with the session."""
    with contextlib.suppress(Exception):
        ray.wait([engine.stop.remote() for engine in engines], num_returns=len(engines), timeout=GRACE_SECONDS)


def visible(path: Path) -> str:
    """A path as actors on other nodes need it: absolute, on a file system that the nodes share."""
    return str(path.absolute())
