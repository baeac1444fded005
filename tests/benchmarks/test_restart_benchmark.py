"""The restart benchmark runs and prints its keys; how fast is no matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.long
def test_the_quick_run_prints_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks.restart", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result.keys() == {"restart_first_verdict_s", "rejudged_per_second", "tasks", "calls"}
    assert (result["tasks"], result["calls"]) == (2_000, 5)
    assert all(value > 0 for value in result.values())
