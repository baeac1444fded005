"""A command starts without what it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "apscheduler",
    "asyncio",
    "httpx2",
    "numpy",
    "openai",
    "pydantic",
    "rich",
    "scipy",
    "sqlalchemy",
    "torch",
    "yaml",
}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_what_needs_no_configuration_waits_for_nothing_that_reads_one(argument: str) -> None:
    started = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "flywheel", argument],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in started.stderr.splitlines()}
    assert "typer" in imported
    assert imported.isdisjoint(HEAVY), imported & HEAVY
