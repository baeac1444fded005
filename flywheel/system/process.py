"""This process: its limits of memory and open files, its GPUs, and its state as systemd hears it.

By default glibc creates one malloc arena per busy thread, and after it has freed a large block it keeps blocks of up
to 32 MB for reuse. Python threads take turns, so extra arenas only retain memory: a first ingestion uses one sixth
more. systemd is told by the protocol of sd_notify(3) (`Type=notify`, `WatchdogSec=`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36

ARENAS: Final = 2
MMAP_THRESHOLD_BYTES: Final = 256 * 1024
"""Blocks of at least this size are mapped separately and returned to the system when they are freed."""
LARGEST_KEPT_BYTES: Final = 2**30
"""Of a process that keeps freed blocks."""
OPEN_FILES: Final = 65_536
"""Shells and systemd often allow only 1,024."""
SYSTEMCTL_SECONDS: Final = 10.0
"""Longest wait for systemd to say how it runs a service."""


def tune_process() -> None:
    """Limit glibc's arenas and its mmap threshold, raise the limit of open files, and keep other processes of this
    user from reading its memory and environment. Call it before starting threads.

    Every JSONL file of a source stays open, because a file that is moved away is still read to its end.
    """
    # Users' functions run as the same user, and could read the keys of this process in /proc.
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    _call("mallopt", _M_ARENA_MAX, ARENAS)
    _call("mallopt", _M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and descriptors > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 1 GiB for reuse, instead of returning them to the system.

    For a process that allocates the same large blocks again and again: each would otherwise be mapped anew, page by
    page. Nothing without glibc.
    """
    _call("mallopt", _M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    _call("mallopt", _M_TRIM_THRESHOLD, 2 * LARGEST_KEPT_BYTES - 1)


def gpus_of_machine() -> int:
    """Number of NVIDIA GPUs that it may use: those of this machine, or of them those in CUDA_VISIBLE_DEVICES."""
    found = len([*Path("/dev").glob("nvidia[0-9]*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        found if visible is None else min(found, sum(each.strip() not in ("", "-1") for each in visible.split(",")))
    )


def in_container(root: Path = Path("/")) -> bool:
    """Whether this is a container (Docker, Podman, Kubernetes), which ends with its first process, and with it all
    others. Not a system container, in which systemd stops services one by one."""
    first = root / "proc/1"
    with contextlib.suppress(OSError):
        if (first / "comm").read_text().strip() == "systemd":
            return False
    marks = (root / ".dockerenv", root / "run/.containerenv")
    if any(mark.exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ:
        return True
    with contextlib.suppress(OSError):
        return any(name.startswith(b"container=") for name in (first / "environ").read_bytes().split(b"\0"))
    return False


def kill_mode(cgroup: Path = Path("/proc/self/cgroup")) -> str:
    """What systemd ends with the service that this process is in (`KillMode=`); empty outside a service, and where
    systemd does not say."""
    # Imported here: child processes that only set their limits start no others.
    import subprocess

    try:
        place = cgroup.read_text().strip().rpartition(":")[2]
        if not place.endswith(".service"):
            return ""
        manager = ["--user"] if "/user@" in place else []
        command = ["systemctl", *manager, "show", Path(place).name, "--property=KillMode", "--value"]
        shown = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=SYSTEMCTL_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout.strip()


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants (a "child subreaper"), so that they can be found again. Linux
    only; elsewhere such orphans are not found."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Let this process be killed when the thread that started it ends. Linux only."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def trim_malloc() -> None:
    """Return free memory of the C heap to the system. A first ingestion leaves about 80 MB. Nothing without glibc."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library, where it has it."""
    import ctypes

    if (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)


def tell_systemd(message: str) -> bool:
    """Send `READY=1`, `STOPPING=1` or `STATUS=…`, one per line; False without a service manager that takes it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)  # A manager that does not read its socket stops nothing.
        try:
            sock.sendto(message.encode(), address)
        except OSError:
            return False
    return True


async def feed_watchdog() -> None:
    """Send watchdog notifications until cancelled, if the unit sets `WatchdogSec=`."""
    # Imported here: child processes that only set their limits load no event loop.
    import asyncio

    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (microseconds.isdecimal() and int(microseconds)) or pid not in ("", str(os.getpid())):
        return
    while True:
        tell_systemd("WATCHDOG=1")
        await asyncio.sleep(int(microseconds) / 2e6)
