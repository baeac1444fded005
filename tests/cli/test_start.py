"""A command starts without what it does not need, and Ctrl-C while modules are still imported ends it with 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import waiting
from tests.factories.commands import root

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


@pytest.mark.slow
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
    if argument == "--help":
        told = " ".join(started.stdout.split())
        for name, command in root().commands.items():
            assert f" {name} {command.get_short_help_str(1_000)}" in told
    assert imported.isdisjoint(HEAVY), imported & HEAVY


SCRIPT = Path(sys.executable).with_name("flywheel")
COMMANDS = {"python -m flywheel": [sys.executable, "-m", "flywheel"], "the script": [str(SCRIPT)]}
SLOW = "import pathlib, time\npathlib.Path('imported').touch()\ntime.sleep(600)\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("module", ["typer", "sqlalchemy"])
def test_an_import_that_is_interrupted_says_nothing(tmp_path: Path, command: str, module: str) -> None:
    """With a module in the place of one that is imported for all commands, or by one of them."""
    if command == "the script" and not SCRIPT.exists():
        pytest.skip("flywheel is not installed here as a script")
    (tmp_path / f"{module}.py").write_text(SLOW)
    (tmp_path / "flywheel.yaml").write_text("state: {dir: state}\nsources: []\n")
    process = subprocess.Popen(
        [*COMMANDS[command], "status"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            waiting.wait_for(lambda: (tmp_path / "imported").exists() or process.poll() is not None, "the import")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=waiting.SOON)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """`nohup` and a shell's `&` start programs so."""
    (tmp_path / "typer.py").write_text(
        "import os, pathlib, signal\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "pathlib.Path('survived').touch()\n"
        "raise SystemExit\n"
    )
    ignoring = "import signal, runpy; signal.signal(signal.SIGINT, signal.SIG_IGN); runpy.run_module('flywheel')"
    subprocess.run(
        [sys.executable, "-c", ignoring],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        timeout=waiting.SOON,
    )
    assert (tmp_path / "survived").exists()
