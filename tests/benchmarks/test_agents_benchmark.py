"""The agents' benchmark runs and prints its keys; what it times is tested in `tests.training`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_quick_run_prints_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks.agents", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result.keys() >= {
        "endpoint_overhead_ms",
        "endpoint_overhead_ms_16",
        "direct_ms",
        "endpoint_ms",
        "merge_speedup",
    }
    # What merging saves, whatever the machine does meanwhile.
    assert result["by_turn_tokens"] > 3 * result["merged_tokens"]
