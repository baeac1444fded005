"""The keys in the environment of the daemon, read by a child of the same user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import ctypes, os, subprocess, sys
from flywheel.system.process import tune_process
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if sys.argv[1] == "tuned":
    tune_process()
read = ["/bin/sh", "-c", "cat /proc/$PPID/environ | tr '\\\\0' '\\\\n'"]
print(subprocess.run(read, capture_output=True, text=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="environments are read in /proc")
@pytest.mark.parametrize("tuned", [True, False])
def test_a_child_cannot_read_the_environment_of_a_tuned_process(tuned: bool) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PARENT, "tuned" if tuned else "plain"],
        env={"PATH": "/usr/bin:/bin", "A_JUDGE_API_KEY": "sk-of-the-judge"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("A_JUDGE_API_KEY=sk-of-the-judge" in found.stdout) is not tuned
    assert ("Permission denied" in found.stdout) is tuned
