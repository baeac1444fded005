"""glibc's malloc: few arenas, and freed blocks that are returned or kept."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Without the limit each of the eight threads gets an arena of its own.
_ARENAS = """
import concurrent.futures, sys, threading
from pathlib import Path
if sys.argv[1] == "tuned":
    from flywheel.system.process import tune_process
    tune_process()
together = threading.Barrier(8)
def burst():
    together.wait()
    blocks = [bytes(4_000) for _ in range(1_000)]
    together.wait()
    return len(blocks)
with concurrent.futures.ThreadPoolExecutor(8) as threads:
    for one in [threads.submit(burst) for _ in range(8)]:
        one.result()
    # An arena is a mapping of 64 MB of addresses.
    maps = Path("/proc/self/maps").read_text().splitlines()
ends = [line.split()[0].split("-") for line in maps if len(line.split()) == 5]
print(sum(int(start, 16) % (64 << 20) == 0 for start, _ in ends))
"""

_FREED = """
import sys
from pathlib import Path
from flywheel.system import process
if sys.argv[1] == "kept":
    process.keep_freed_memory()
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
before = resident_mb()
block = bytearray(b"1") * (100 << 20)
held = resident_mb() - before
del block
print(held, resident_mb() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such arenas")
def test_threads_share_arenas() -> None:
    def arenas(kind: str) -> int:
        run = subprocess.run([sys.executable, "-c", _ARENAS, kind], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert arenas("tuned") <= 2 < arenas("as it is")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such limit")
def test_freed_blocks_are_kept_for_reuse() -> None:
    def resident_mb(kind: str) -> list[int]:
        run = subprocess.run([sys.executable, "-c", _FREED, kind], capture_output=True, text=True, check=True)
        return [int(figure) for figure in run.stdout.split()]

    held, after = resident_mb("kept")
    assert held >= 95 and after >= 95
    held, after = resident_mb("as it is")
    assert held >= 95 and after < 50
