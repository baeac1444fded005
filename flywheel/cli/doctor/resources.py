"""Checks of the machine against the estimated needs of rounds and server: GPUs, memory, shared memory, limits."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flywheel.cli.doctor.finding import Finding, Result
from flywheel.cli.doctor.model import Base
from flywheel.cli.doctor.servers import is_local
from flywheel.config import Config
from flywheel.system.terminal import byte_size
from flywheel.training.engine.gpu_placement import place_on_gpus

PROCESS_BYTES: Final = 1_200 << 20
"""Measured memory of a process with torch and vLLM, without weights and cache."""
SHARED_BYTES: Final = 200 << 20
"""Twice Ray's object store in a round."""
OPEN_FILES: Final = 1024
PROCESSES: Final = 1024
"""Threads count: Ray and vLLM start hundreds."""
SERVER_UTILIZATION: Final = 0.9
"""vLLM's default share of a GPU."""
GPU_SECONDS: Final = 120.0
"""Longest wait for the process that lists the GPUs."""
_BY_TORCH: Final = """
import torch
torch.cuda.init()
for n in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(n)
    print(gpu.name, 0 if getattr(gpu, "is_integrated", 0) else gpu.total_memory, sep="\\t")
"""
_BY_DRIVER: Final = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory` in bytes; None for a GPU that shares the system's memory, and where it is not known."""

    name: str
    memory: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes and counts; None where the system does not report it. Limits are those of this user.

    `gpus` are those that programs see; `gpu_trouble` is the error of the program that lists them; `gpus_are_chosen`
    is whether CUDA_VISIBLE_DEVICES limits them.
    """

    memory: int | None = None
    memory_free: int | None = None
    shared_memory: int | None = None
    open_files: int | None = None
    processes: int | None = None
    address_space: int | None = None
    gpus: Sequence[Gpu] = ()
    gpu_trouble: str = ""
    gpus_are_chosen: bool = False

    @classmethod
    def here(cls, *, has_gpu_build: bool) -> Machine:
        """This machine. torch lists the GPUs if its GPU build is installed, otherwise nvidia-smi."""
        shared = None
        with contextlib.suppress(OSError):
            shared = shutil.disk_usage("/dev/shm").free
        kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS)
        files, processes, space = (
            None if soft == resource.RLIM_INFINITY else soft for soft, _ in map(resource.getrlimit, kinds)
        )
        gpus, trouble = _gpus_by([sys.executable, "-c", _BY_TORCH] if has_gpu_build else _BY_DRIVER)
        is_chosen = "CUDA_VISIBLE_DEVICES" in os.environ
        return cls(*_system_memory(), shared, files, processes, space, gpus, trouble, is_chosen)


def _system_memory() -> tuple[int | None, int | None]:
    """Total and available memory, within the limit of a container."""
    try:
        kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, free = int(kib["MemTotal"]) << 10, int(kib["MemAvailable"]) << 10
    except (OSError, KeyError):
        return None, None
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _gpus_by(command: Sequence[str]) -> tuple[list[Gpu], str]:
    """What a program lists: a line for each GPU, with its bytes after a tab if it knows them. Or its error."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace",
                              timeout=GPU_SECONDS, stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode:
        said = " ".join((done.stdout + " " + done.stderr).split())
        return [], f"{command[0]}: {said[-300:]}"
    lines = [line.partition("\t") for line in done.stdout.splitlines()]
    return [Gpu(name, int(memory or 0) or None) for name, _, memory in lines], ""


def check_resources(config: Config, machine: Machine, base: Base, *, build: str) -> Iterator[Finding]:
    """GPUs, memory, shared memory, limits. `build` is the vLLM that is installed: "cpu", "gpu" or none ("")."""
    memory = min((gpu.memory or machine.memory or 0 for gpu in machine.gpus), default=0)
    figures = {"gpus": len(machine.gpus), "memory_bytes": memory}
    yield Finding("gpu", *_gpus(config, machine, base, build, memory), figures=figures)
    if build:
        yield _memory(config, machine, base)
        yield _shared(config, machine)
    else:
        why = "no round or server can run here without vLLM"
        yield from (Finding(name, Result.SKIPPED, why) for name in ("memory", "shared memory"))
    yield _limits(machine)


def _gpus(config: Config, machine: Machine, base: Base, build: str, memory: int) -> tuple[Result, str, str]:
    """`memory` is that of the smallest GPU, in bytes."""
    gpus = machine.gpus
    if not gpus and build == "gpu":
        why = "vLLM is the build for GPUs, and there is none"
        why = f"{why}: {machine.gpu_trouble}" if machine.gpu_trouble else why
        return Result.FAILED, why, "Install the GPU's driver, or without a GPU install the extra [cpu]."
    if not gpus:
        return Result.OK, "none: rounds and server use the CPU", ""
    if build != "gpu":
        names = "; ".join(gpu.name for gpu in gpus)
        return Result.WARNING, f"{names}: not used without the GPU build", "Install the extra [gpu]."
    text = "; ".join(
        f"{gpu.name}, {'system memory' if gpu.memory is None else byte_size(gpu.memory)}" for gpu in gpus
    )
    placement = place_on_gpus(config.rollout.engines, len(gpus), with_trainer=True)
    share = min(gpu_share.memory(config.rollout.gpu_memory_utilization) for gpu_share in placement.engines)
    if base.weights and base.weights >= int(share * memory):
        why = f"{text}: the share of an engine, {byte_size(int(share * memory))}, is less than the model's weights"
        remedy = "Raise rollout.gpu_memory_utilization, or use a smaller model or a larger GPU."
        return Result.FAILED, f"{why}, {byte_size(base.weights)}", remedy
    given = re.search(r"--gpu[-_]memory[-_]utilization[= ](\d*\.?\d+)", " ".join(config.serving.extra_args))
    server = float(given[1]) if given else SERVER_UTILIZATION
    # By default server and round both use the first GPU.
    if is_local(config) and not machine.gpus_are_chosen and server + share > 1:
        why = f"{text}: the server takes {server:g} of {'it' if len(gpus) == 1 else 'the first'}"
        remedy = 'Set serving.extra_args: [--gpu-memory-utilization, "0.4"], or CUDA_VISIBLE_DEVICES for each.'
        return Result.WARNING, f"{why} and a rollout engine {share:g}, which is more than there is", remedy
    return Result.OK, text, ""


def _memory(config: Config, machine: Machine, base: Base) -> Finding:
    if machine.memory is None or machine.memory_free is None:
        return Finding("memory", Result.SKIPPED, "the system does not report its memory")
    # On a CPU, and on a GPU that shares the system's memory, trainer and engines each hold the weights.
    weights = base.weights if all(gpu.memory is None for gpu in machine.gpus) else 0
    gib = 0 if machine.gpus else 1 << 30
    engines = config.rollout.engines
    needs = (engines + 1) * (PROCESS_BYTES + weights) + engines * config.rollout.cpu_kv_cache_gib * gib
    of_server = ""
    if is_local(config):
        needs += PROCESS_BYTES + weights + config.serving.cpu_kv_cache_gib * gib
        of_server = ", the server included"
    text = f"{byte_size(machine.memory)}, of which {byte_size(machine.memory_free)} are free"
    text += f"; a round takes about {byte_size(needs)}{of_server}"
    if not base.weights:
        text += "; plus the model's weights, of unknown size"
    result, remedy = Result.OK, ""
    if needs > machine.memory_free:
        result = Result.FAILED if needs > machine.memory else Result.WARNING
        remedy = "Use more memory, a smaller model, fewer rollout.engines or smaller cpu_kv_cache_gib."
        if result is Result.WARNING:
            remedy = f"If the server runs now, this is normal; otherwise: {remedy}"
    figures = {"memory_bytes": machine.memory, "free_bytes": machine.memory_free, "estimated_bytes": needs}
    return Finding("memory", result, text, remedy, figures=figures)


def _shared(config: Config, machine: Machine) -> Finding:
    if config.ray.address:
        return Finding("shared memory", Result.SKIPPED, f"rounds run on the cluster at {config.ray.address}")
    free = machine.shared_memory
    if free is None:
        remedy = "Mount it: Ray keeps its objects there."
        return Finding("shared memory", Result.WARNING, "there is no /dev/shm", remedy)
    result, text, remedy = Result.OK, f"{byte_size(free)} free in /dev/shm", ""
    if free < SHARED_BYTES:
        result, text = Result.WARNING, f"{text}; {byte_size(SHARED_BYTES)} are needed"
        remedy = "Give the container more: docker run --shm-size=1g."
    return Finding("shared memory", result, text, remedy, figures={"free_bytes": free})


def _limits(machine: Machine) -> Finding:
    limits = (
        (machine.open_files, "open files (ulimit -n)", OPEN_FILES),
        (machine.processes, "processes and threads (ulimit -u)", PROCESSES),
    )
    low = [f"{found:,} {what}, {needed:,} are needed" for found, what, needed in limits if found and found < needed]
    if machine.address_space is not None:
        low.append(f"an address space of {byte_size(machine.address_space)} (ulimit -v); vLLM reserves more")
    if low:
        remedy = "Raise them in limits.conf(5) or in the systemd unit."
        return Finding("limits", Result.WARNING, f"the limits of this user are low: {'; '.join(low)}", remedy)
    files = "any number of" if machine.open_files is None else f"{machine.open_files:,}"
    return Finding("limits", Result.OK, f"{files} open files; processes and address space are enough")
