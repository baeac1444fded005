"""Runs genuine agents as programs of their own against a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
NOWHERE = "http://127.0.0.1:1"


def run(program: Path, *arguments: str, server: str, traces: str | None = None, **environment: str) -> list[str]:
    """What a Python program prints, by line. `server` is its model's address, `traces` that of the OTLP receiver."""
    given = {
        **os.environ,
        "OPENAI_BASE_URL": f"{server}/v1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": traces or NOWHERE,
        "OTEL_TRACES_EXPORTER": "otlp",
        **({} if traces else {"OTEL_SDK_DISABLED": "true"}),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=given,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
