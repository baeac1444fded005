"""The benchmark of the call path counts the functions of a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_task_passes_through_more_code_than_a_reply() -> None:
    command = [sys.executable, "-m", "benchmarks.call_path", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result.keys() == {"reply_functions", "reply_files", "task_functions", "task_files"}
    assert 0 < result["reply_files"] < result["reply_functions"] < result["task_functions"]
    assert result["reply_files"] < result["task_files"] < result["task_functions"]
