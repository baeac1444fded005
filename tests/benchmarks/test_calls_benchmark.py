"""The benchmark of the call log runs and prints its keys; how fast is no matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_quick_run_prints_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks.calls", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result.keys() >= {"call_log_overhead_ms", "plain_overhead_ms", "stream_overhead_ms"}
    # No request without its record, and no record without its request.
    assert (result["recorded"], result["dropped"]) == (result["asked"], 0)
    assert result["mb_on_disk"] < result["mb_sent"] / 2
