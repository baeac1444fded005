"""The benchmark of a daemon at rest runs and prints its keys; its figures do not matter here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_quick_run_prints_one_object() -> None:
    command = [sys.executable, "-m", "benchmarks.idle", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result.keys() >= {"rss_mb", "core_percent", "children", "seconds"}
    assert (result["sources"], result["spans"], result["children"]) == (3, 300, 0)
    assert result["rss_mb"] > 0 and result["core_percent"] >= 0
    assert result["judged"] >= 20
