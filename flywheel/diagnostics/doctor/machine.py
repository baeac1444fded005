"""The machine as the doctor sees it: memory, shared memory, limits, GPUs, file systems. Read, never measured."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from flywheel.diagnostics.doctor.gpus import Gpus

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
        memory, free = _memory()
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


def _memory() -> tuple[int | None, int | None]:
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
