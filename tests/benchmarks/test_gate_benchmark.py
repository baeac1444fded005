"""The gate's benchmark runs and prints its keys; its figures are what the program does, see `tests.training.gate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_run_prints_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks.gate", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    false = [result[f"false_promotion_20{kind}"] for kind in ("", "_clustered", "_growing")]
    assert all(share <= 0.2 for share in false), "of ten sequences"
    assert result["power_10_points"].keys() >= {"50", "200"}
    assert result["power_10_points"]["200"] >= 0.5
