"""Whether the machine has what the configured rounds and server take. Estimates, and said to be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from flywheel.config import Config
from flywheel.diagnostics.doctor.finding import Finding, Result, size
from flywheel.diagnostics.doctor.gpus import Gpu, remedy_of
from flywheel.diagnostics.doctor.machine import Machine
from flywheel.diagnostics.doctor.model import Base
from flywheel.diagnostics.doctor.servers import is_local
from flywheel.gpu_placement import seating

PROCESS_BYTES: Final = 1_200 << 20
"""What a process with torch and vLLM takes beside weights and cache, measured."""
OBJECT_STORE_BYTES: Final = 100 << 20
"""What a round gives Ray for its objects."""
OPEN_FILES: Final = 1024
PROCESSES: Final = 1024
"""Threads count: Ray and vLLM start hundreds."""
SERVER_UTILIZATION: Final = 0.9
"""vLLM's own default for the share of a GPU that a server takes."""


def resources(config: Config, machine: Machine, base: Base, *, build: str) -> Iterator[Finding]:
    """GPUs, memory, shared memory, limits. `build` is the vLLM that is installed: "cpu", "gpu" or none ("")."""
    yield from _gpus(config, machine, base, build)
    if not build:
        why = "no round or server can run here without vLLM"
        yield from (Finding(name, Result.SKIPPED, why) for name in ("memory", "shared memory"))
    else:
        yield _memory(config, machine, base)
        yield _shared(config, machine)
    yield _limits(machine)


def _gpus(config: Config, machine: Machine, base: Base, build: str) -> Iterator[Finding]:
    gpus = machine.gpus.seen
    told = "; ".join(f"{gpu.name}, {_memory_of(gpu)}" for gpu in gpus)
    memory = min((gpu.memory or machine.memory or 0 for gpu in gpus), default=0)
    figures = {"gpus": len(gpus), "memory_bytes": memory}
    if not gpus:
        if build == "gpu":
            told, remedy = _none(machine.gpus.trouble)
            yield Finding("gpu", Result.FAILED, told, remedy, figures=figures)
        else:
            yield Finding("gpu", Result.OK, "none: rounds and server use the CPU", figures=figures)
        return
    if build == "cpu":
        remedy = "Install the build that uses them: pip install 'agentscope-flywheel[gpu]'."
        yield Finding("gpu", Result.WARNING, f"{told}: unused, vLLM is the build for CPUs", remedy, figures=figures)
        return
    seats = seating(config.rollout.engines, len(gpus), with_trainer=True)
    share = min(seat.memory(config.rollout.gpu_memory_utilization) for seat in seats.engines)
    room = int(share * memory)
    if base.weights and base.weights >= room:
        told = f"{told}: an engine's share, {size(room)}, does not hold the model's {size(base.weights)}"
        remedy = "Raise rollout.gpu_memory_utilization, or use a smaller model or a larger GPU."
        yield Finding("gpu", Result.FAILED, told, remedy, figures=figures)
        return
    server = _utilization(config.serving.extra_args)
    # Of several GPUs both take the first, unless somebody has chosen for them.
    is_shared = machine.gpus.all_told == 1 or len(gpus) == machine.gpus.all_told
    if build and is_local(config) and is_shared and server + share > 1:
        of = "it" if len(gpus) == 1 else "the first"
        told = (
            f"{told}: the server takes {server:g} of {of} and a rollout engine {share:g}, which is more than there is"
        )
        remedy = 'Leave room: serving.extra_args: [--gpu-memory-utilization, "0.4"]'
        if len(gpus) > 1:
            remedy += ", or give `flywheel serve` and `flywheel run` each its own, by CUDA_VISIBLE_DEVICES"
        yield Finding("gpu", Result.WARNING, told, f"{remedy}.", figures=figures)
        return
    if machine.gpus.trouble:
        remedy = remedy_of(machine.gpus.trouble)
        yield Finding("gpu", Result.WARNING, f"{told}; {machine.gpus.trouble}", remedy, figures=figures)
        return
    yield Finding("gpu", Result.OK, f"{told} (by {machine.gpus.asked})", figures=figures)


def _memory_of(gpu: Gpu) -> str:
    return "the system's memory" if gpu.memory is None else size(gpu.memory)


def _none(trouble: str) -> tuple[str, str]:
    """That vLLM would find no GPU, and what to do."""
    told = "vLLM is the build for GPUs, and there is none"
    if trouble:
        return f"{told}: {trouble}", remedy_of(trouble)
    return told, "Install the driver, or pip install 'agentscope-flywheel[cpu]' after uninstalling vllm and torch."


def _utilization(arguments: Sequence[str]) -> float:
    joined = " ".join(arguments)
    found = re.search(r"--gpu[-_]memory[-_]utilization[= ]([\d.]+)", joined)
    return float(found[1]) if found and found[1].count(".") <= 1 and found[1] != "." else SERVER_UTILIZATION


def _memory(config: Config, machine: Machine, base: Base) -> Finding:
    if machine.memory is None or machine.memory_free is None:
        return Finding("memory", Result.SKIPPED, "this system does not tell how much there is")
    engines = config.rollout.engines
    takes = (engines + 1) * PROCESS_BYTES
    # On a CPU, and on a GPU without memory of its own, weights for the trainer and each engine; the engines' caches.
    weights = base.weights if all(gpu.memory is None for gpu in machine.gpus.seen) else 0
    gib = 0 if machine.gpus.seen else 1 << 30
    takes += (engines + 1) * weights + engines * config.rollout.cpu_kv_cache_gib * gib
    if is_local(config):
        takes += PROCESS_BYTES + weights + config.serving.cpu_kv_cache_gib * gib
    figures = {"memory_bytes": machine.memory, "free_bytes": machine.memory_free, "estimated_bytes": takes}
    told = f"{size(machine.memory)}, of which {size(machine.memory_free)} are free; a round takes about {size(takes)}"
    if is_local(config):
        told += ", the server included"
    if not base.weights:
        told += "; the model's weights, of unknown size, come on top"
    remedy = "Use a machine with more memory, a smaller model, fewer rollout.engines or smaller cpu_kv_cache_gib."
    if takes > machine.memory:
        return Finding("memory", Result.FAILED, told, remedy, figures=figures)
    if takes > machine.memory_free:
        return Finding("memory", Result.WARNING, told, f"What runs now may be the server itself; else: {remedy}",
                       figures=figures)  # fmt: skip
    return Finding("memory", Result.OK, told, figures=figures)


def _shared(config: Config, machine: Machine) -> Finding:
    if config.ray.address:
        return Finding("shared memory", Result.SKIPPED, f"rounds run on the cluster at {config.ray.address}")
    if machine.shared_memory is None:
        return Finding(
            "shared memory", Result.WARNING, "there is no /dev/shm", "Mount it: Ray keeps its objects there."
        )
    free, needed = machine.shared_memory, 2 * OBJECT_STORE_BYTES
    figures = {"free_bytes": free}
    told = f"{size(free)} free in /dev/shm"
    if free < needed:
        remedy = "Give the container more: docker run --shm-size=1g (Ray falls back to slow files in /tmp)."
        return Finding("shared memory", Result.WARNING, f"{told}; {size(needed)} are needed", remedy, figures=figures)
    return Finding("shared memory", Result.OK, told, figures=figures)


def _limits(machine: Machine) -> Finding:
    low = []
    if machine.open_files is not None and machine.open_files < OPEN_FILES:
        low.append(f"{machine.open_files:,} open files (ulimit -n), {OPEN_FILES:,} are needed")
    if machine.processes is not None and machine.processes < PROCESSES:
        low.append(f"{machine.processes:,} processes and threads (ulimit -u), {PROCESSES:,} are needed")
    if machine.address_space is not None:
        low.append(f"an address space of {size(machine.address_space)} (ulimit -v), of which vLLM reserves more")
    if low:
        remedy = "Raise them in limits.conf(5), or by LimitNOFILE= and LimitNPROC= in the systemd unit."
        return Finding("limits", Result.WARNING, f"this user may have {'; '.join(low)}", remedy)
    files = "any number of" if machine.open_files is None else f"{machine.open_files:,}"
    return Finding("limits", Result.OK, f"{files} open files; processes and address space are enough")
