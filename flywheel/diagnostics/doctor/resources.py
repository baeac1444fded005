"""Whether the machine has what the configured rounds and server take. Estimates, and said to be."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from flywheel.config import Config
from flywheel.diagnostics.doctor.finding import Finding, Result, size
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


def check_resources(config: Config, machine: Machine, base: Base, *, build: str) -> Iterator[Finding]:
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


ASK_SECONDS: Final = 20.0
"""Longest wait for the driver."""
IMPORT_SECONDS: Final = 120.0
"""Longest wait for a process that imports torch."""
_TORCH: Final = (
    "import torch\nfor n in range(torch.cuda.device_count()):\n"
    " p = torch.cuda.get_device_properties(n)\n print(p.name, p.total_memory, sep='\\t')"
)
_FIELDS: Final = ("index", "uuid", "mig.mode.current", "name", "memory.total")
_QUERY: Final = (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_CARD: Final = re.compile(r"GPU (\d+):")
_PART: Final = re.compile(r"\s+MIG\s+(\S+)\s+Device\s+\d+:\s+\(UUID:\s+([^)\s]+)\)")
_PART_SIZE: Final = re.compile(r"\.(\d+)gb")
_NO_SIZE: Final = re.compile(r"\[?(N/A|Not Supported|Insufficient Permissions)\]?")
_MIB: Final = 1 << 20
_PART_SHARE: Final = 0.95
"""Of the gigabytes in a part's name, the least that it has: 4,864 MiB of 1g.5gb, 9,728 of 1g.10gb."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or part of one. `memory` in bytes; None where the driver tells of none: it shares the system's."""

    name: str
    memory: int | None
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Those that programs see, of `all_told`. `asked` is who told, empty where nobody could; `trouble` what was said
    of others, or instead."""

    seen: tuple[Gpu, ...] = ()
    all_told: int = 0
    asked: str = ""
    trouble: str = ""

    @classmethod
    def here(cls, *, has_gpu_build: bool) -> Gpus:
        """Those of this machine. Where the driver tells of none, and with `has_gpu_build`, a process of its own asks
        torch: ROCm, or a container without nvidia-smi."""
        told = _by_driver() if shutil.which("nvidia-smi") else cls()
        return _by_torch(told) if has_gpu_build and not told.all_told else told


def remedy_of(trouble: str) -> str:
    """What to do about what the driver said."""
    for words, remedy in _REMEDIES.items():
        if words.lower() in trouble.lower():
            return remedy
    return "See what nvidia-smi and the kernel's log (dmesg) say."


_REMEDIES: Final = {
    "version mismatch": "Restart the machine: its driver was updated, and the kernel still has the old one.",
    "communicate with the NVIDIA driver": "Install or load the driver (modprobe nvidia); a new kernel needs it anew.",
    "Insufficient Permissions": "Let this user open /dev/nvidia*, often by the group video.",
    "No devices were found": "Give the container a GPU, or see what the kernel's log says of it.",
    "CUDA_VISIBLE_DEVICES": "Correct that variable, or unset it.",
    "Unknown Error": "In a container: start it anew, it has lost its devices. Else see the kernel's log (dmesg).",
    "is lost": "Restart the machine.",
    "MIG is enabled": "Divide it (nvidia-smi mig -cgi … -C), or disable MIG (nvidia-smi -mig 0).",
    "requires reset": "Reset that GPU, or restart the machine.",
}
"""The first whose words were said."""


def _by_driver() -> Gpus:
    lines, trouble = _said(["nvidia-smi", *_QUERY], ASK_SECONDS)
    if lines is None:
        return Gpus(trouble=f"nvidia-smi: {trouble}")
    parts = _parts()
    cards: dict[str, Gpu] = {}
    troubles = []
    for line in lines:
        fields = [text.strip() for text in line.split(",")]
        if not fields[0].isdecimal() or len(fields) < len(_FIELDS):
            continue  # a warning of the driver
        index, uuid, mig, *name, memory = fields
        gpu = Gpu(", ".join(name), None, uuid)
        if mig == "Enabled" and index not in parts:
            troubles.append(f"GPU {index}, {gpu.name}: MIG is enabled, and it has no parts")
        elif memory.isdecimal():
            cards[index] = replace(gpu, memory=int(memory) * _MIB)
        elif _NO_SIZE.fullmatch(memory):
            cards[index] = gpu
        else:
            troubles.append(f"GPU {index}, {gpu.name}: {memory.strip('[]')}")
    trouble = "; ".join(troubles)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = tuple(_visible(cards, parts, chosen))
    if chosen is not None and cards and not seen:
        trouble = f"CUDA_VISIBLE_DEVICES={chosen} lets programs see none of {len(cards)}"
    return Gpus(seen, len(cards), "nvidia-smi", trouble)


def _parts() -> dict[str, list[Gpu]]:
    """The parts of each GPU that is divided, by its index."""
    lines, _ = _said(["nvidia-smi", "-L"], ASK_SECONDS)
    found: dict[str, list[Gpu]] = {}
    index = ""
    for line in lines or ():
        if card := _CARD.match(line):
            index = card[1]
        elif part := _PART.match(line):
            size = _PART_SIZE.search(part[1])
            memory = int(int(size[1]) * _PART_SHARE * (1 << 30)) if size else None
            found.setdefault(index, []).append(Gpu(f"MIG {part[1]}", memory, part[2]))
    return found


def _visible(cards: dict[str, Gpu], parts: dict[str, list[Gpu]], chosen: str | None) -> Iterator[Gpu]:
    """As CUDA has it: whole GPUs, else one part; of a list, all before the first that there is not."""
    whole = {index: gpu for index, gpu in cards.items() if index not in parts}
    if chosen is None:
        yield from whole.values() or list(_every(parts.values()))[:1]
        return
    for name in (text.strip() for text in chosen.split(",")):
        by_number = [whole[name]] if name in whole else parts.get(name, [])[:1]
        by_uuid = [gpu for gpu in (*cards.values(), *_every(parts.values())) if name and gpu.uuid.startswith(name)]
        found = by_number or by_uuid[:1]
        if not found:
            return
        yield found[0]


def _every(parts: Iterable[list[Gpu]]) -> Iterator[Gpu]:
    return (gpu for each in parts for gpu in each)


def _by_torch(driver: Gpus) -> Gpus:
    lines, _ = _said([sys.executable, "-c", _TORCH], IMPORT_SECONDS)
    fields = [line.split("\t") for line in lines or ()]
    seen = tuple(Gpu(each[0], int(each[1])) for each in fields if len(each) == 2 and each[1].isdecimal())
    return Gpus(seen, len(seen), "torch") if seen else driver


def _said(command: Sequence[str], seconds: float) -> tuple[list[str] | None, str]:
    """The lines that a program prints, or None and what it says where it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:g} s"
    except (OSError, ValueError) as error:
        return None, str(error)
    if done.returncode != 0:
        # It says what is wrong on either.
        said = " ".join((done.stdout + " " + done.stderr).split())
        return None, said[:300] or f"it ended with {done.returncode}"
    return [line for line in done.stdout.splitlines() if line.strip()], ""


NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|9p|ceph|glusterfs|lustre|afs|fuse\.(sshfs|s3fs|glusterfs|rclone)"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes and counts; None where the system does not tell. `open_files` and `processes` are this user's limits."""

    memory: int | None = None
    memory_free: int | None = None
    shared_memory: int | None = None
    open_files: int | None = None
    processes: int | None = None
    address_space: int | None = None
    gpus: Gpus = field(default_factory=Gpus)

    @classmethod
    def here(cls, *, has_gpu_build: bool) -> Machine:
        """This one. With `has_gpu_build` a process of its own asks torch for GPUs, where the driver tells of none."""
        memory, free = _system_memory()
        shared = None
        with contextlib.suppress(OSError):
            shared = shutil.disk_usage("/dev/shm").free
        return cls(
            memory,
            free,
            shared,
            _limit(resource.RLIMIT_NOFILE),
            _limit(resource.RLIMIT_NPROC),
            _limit(resource.RLIMIT_AS),
            Gpus.here(has_gpu_build=has_gpu_build),
        )


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _system_memory() -> tuple[int | None, int | None]:
    """All there is, and what is free or can be made so; a container's limit counts."""
    try:
        told = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, free = int(told["MemTotal"]) << 10, int(told["MemAvailable"]) << 10
    except (OSError, KeyError, ValueError):
        return None, None
    for limit_file, used_file in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "")):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path("/sys/fs/cgroup", limit_file).read_text())
            used = int(Path("/sys/fs/cgroup", used_file).read_text()) if used_file else 0
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that a path is on; empty where that cannot be told."""
    real = os.path.realpath(path)
    found, kind = "", ""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        below = real == place or real.startswith(place.rstrip("/") + "/")
        # Of two at one place the later one covers the other.
        if below and len(place) >= len(found):
            found, kind = place, fields[2]
    return kind


def is_network(kind: str) -> bool:
    """Whether other machines write to a file system of this type without this one's being told."""
    return NETWORK.fullmatch(kind) is not None
