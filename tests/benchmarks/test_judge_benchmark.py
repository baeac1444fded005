"""The judging benchmark runs and prints its keys; how fast is no matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_quick_run_prints_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks.judge", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result.keys() >= {"efficiency_16", "efficiency_256_1s", "overhead_vs_client"}
    assert all(value > 0 for value in result.values())
    # Faster than the judge's latency allows would be a mistake of the measurement.
    assert max(result["efficiency_16"], result["efficiency_256_1s"]) < 1.5
