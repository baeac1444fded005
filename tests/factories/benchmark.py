"""What benchmarks print when they run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def result_of(name: str, *arguments: str, seconds: float = 500) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert ran.returncode == 0, ran.stderr
    printed: dict[str, Any] = json.loads(ran.stdout)
    return printed
