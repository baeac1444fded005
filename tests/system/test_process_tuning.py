"""glibc's malloc is limited to a few arenas."""

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such arenas")
def test_threads_share_arenas() -> None:
    def arenas(kind: str) -> int:
        run = subprocess.run([sys.executable, "-c", _ARENAS, kind], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert arenas("tuned") <= 2 < arenas("as it is")
