"""Processes in the place of a round's worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flywheel.records.round import RoundResult

REFUSED = RoundResult(round_id="r0001", outcome="refused", reason="no spread").model_dump_json()
REFUSES = f"echo '{REFUSED}' > $3/result.json"


def works(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A shell script that the daemon starts as a worker; $3 is its directory."""
    worker = folder / "worker"
    worker.write_text(f"#!/bin/sh\n{script}\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))


@contextmanager
def stray_worker(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like the worker of a round: its command line has the same words."""
    code = "import time; print('up', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, "flywheel.training.worker", str(directory)]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()
