"""How a benchmark measures and reports: fresh processes, their memory, medians, the machine, one object as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

_SAMPLE_SECONDS: Final = 0.02
_MEBIBYTE: Final = 1024 * 1024
KEPT: Final = Path(tempfile.gettempdir(), f"flywheel-benchmarks-{os.getuid()}")
"""Where databases are kept if nobody names a folder: a million spans take 62 s to make, and 4.3 GB."""


@dataclass(frozen=True, slots=True)
class Measured:
    """`value` is what the function returned; time and memory count from where it called `begin`.

    `cpu_seconds` are those of the process and its children: they say more than `seconds` on a machine that is shared.
    """

    value: Any
    seconds: float
    cpu_seconds: float
    growth_mb: float


class _Clock:
    """Given to the measured function: calling it starts the measurement."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.rss = 0

    def __call__(self) -> None:
        with contextlib.suppress(OSError):
            # Linux: the peak counts from here, not from the imports.
            Path("/proc/self/clear_refs").write_text("5")
        self.rss = _tree_rss(psutil.Process())
        self.cpu_seconds = _cpu_seconds()
        self.seconds = time.perf_counter()


def measure(function: Callable[..., Any], *arguments: Any) -> Measured:
    """Run `function(begin, *arguments)` in a fresh process. It calls `begin()` when its imports are done.

    Memory is the resident set of the process and its children, less that at `begin`: the highest that was seen, or
    what Linux knows to be the process's own peak.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    peak = 0
    try:
        tree = psutil.Process(process.pid)
        while not ours.poll(_SAMPLE_SECONDS):
            peak = max(peak, _tree_rss(tree))
        try:
            value, seconds, cpu_seconds, before, own_peak = ours.recv()
        except EOFError:
            raise SystemExit(f"{function.__name__} failed; see above") from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
    return Measured(value, seconds, cpu_seconds, (max(peak, own_peak) - before) / _MEBIBYTE)


def _run(parent: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    clock = _Clock()
    value = function(clock, *arguments)
    seconds = time.perf_counter() - clock.seconds
    cpu_seconds = _cpu_seconds() - clock.cpu_seconds
    parent.send((value, seconds, cpu_seconds, clock.rss, max(_own_peak(), _tree_rss(psutil.Process()))))


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _own_peak() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _tree_rss(process: psutil.Process) -> int:
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total


def warm(path: Path) -> None:
    """Bring a file into the page cache, so that nobody pays for the disk."""
    with path.open("rb") as file:
        while file.read(16 * _MEBIBYTE):
            pass


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, str]:
    """What the figures depend on besides the code. Load is the one-minute average before the measurement."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    options.add_argument("--json", action="store_true", help="print one object and nothing else")
    options.add_argument("--quick", action="store_true", help="a small version: its shape counts, not its figures")
    options.add_argument("--dir", type=Path, help=f"keep the databases here (default: {KEPT})")
    return options


@contextlib.contextmanager
def folders(kept: Path | None) -> Iterator[tuple[Path, Path]]:
    """Where databases are kept for later runs, and a directory for this run alone on the same disk."""
    kept = (kept or KEPT).absolute()
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flywheel-benchmark-", dir=kept) as scratch:
        yield kept, Path(scratch)


def report(result: Mapping[str, Any], machine_before: Mapping[str, str], *, as_json: bool) -> None:
    """Print the figures, and for people also the machine."""
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:24} {value:,.3f}" if isinstance(value, float) else f"{key:24} {value}")
    print("on " + ", ".join(f"{key} {value}" for key, value in machine_before.items()))


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of the documentation; all columns but the first are of figures."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
