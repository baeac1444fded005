"""What a line of the log looks like, on a terminal or in a file and to the journal."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.system import log

LOGS = """
import logging
from flywheel.system import log
log.setup()
log = logging.getLogger("flywheel.test")
log.info("all is well")
log.warning("one line\\nand another")
log.error("\x1b[2J is told")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_journal", [True, False])
def test_the_journal_gets_levels_and_a_file_gets_times(tmp_path: Path, is_journal: bool) -> None:
    """Whatever a service starts inherits the variable, and may write elsewhere."""
    with (tmp_path / "log").open("wb") as stderr, (tmp_path / "other").open("wb") as other:
        found = os.fstat((stderr if is_journal else other).fileno())
        stream = f"{found.st_dev}:{found.st_ino}"
        subprocess.run(
            [sys.executable, "-c", LOGS],
            env={**os.environ, "JOURNAL_STREAM": stream},
            stderr=stderr,
            check=True,
            timeout=120,
        )
    lines = (tmp_path / "log").read_text().splitlines()
    if is_journal:
        assert lines == [
            "<6>INFO    flywheel.test: all is well",
            "<4>WARNING flywheel.test: one line",
            "<4>and another",
            "<3>ERROR   flywheel.test: ␛[2J is told",
        ]
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    flywheel.test: all is well", lines[0])


@pytest.mark.slow
def test_without_a_stderr_nothing_breaks() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys; sys.stderr = None\n" + LOGS],
        check=True,
        timeout=120,
        stderr=subprocess.PIPE,
    )


AS_JSON = """
import logging
from flywheel.system import log
log.setup(as_json=True)
log = logging.getLogger("flywheel.test")
log.warning("one line\\nand %s \u202e", "\x1b[2J")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a defect")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_journal", [True, False])
def test_a_line_of_json_is_one_event_and_exact(tmp_path: Path, is_journal: bool) -> None:
    with (tmp_path / "log").open("wb") as stderr:
        found = os.fstat(stderr.fileno())
        stream = f"{found.st_dev}:{found.st_ino}" if is_journal else ""
        subprocess.run(
            [sys.executable, "-c", AS_JSON],
            env={**os.environ, "JOURNAL_STREAM": stream},
            stderr=stderr,
            check=True,
            timeout=120,
        )
    text = (tmp_path / "log").read_text()
    assert text.isascii() and text.replace("\n", "").isprintable()
    lines = text.splitlines()
    if is_journal:
        assert [line[:3] for line in lines] == ["<4>", "<3>"]
        lines = [line[3:] for line in lines]
    warning, defect = map(json.loads, lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", warning.pop("time"))
    told = "one line\nand \x1b[2J \u202e"
    assert warning == {"level": "WARNING", "logger": "flywheel.test", "message": told}
    assert defect["exception"].endswith("ZeroDivisionError: division by zero")


def test_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar puts its own in the place, so that lines are above it."""
    root, logger = logging.getLogger(), logging.getLogger("flywheel")
    for each in (root, logger):
        monkeypatch.setattr(each, "level", each.level)
    monkeypatch.setattr(root, "handlers", [])
    log.setup()
    monkeypatch.setattr(sys, "stderr", drawn := io.StringIO())
    logger.warning("above the bar")
    assert "above the bar" in drawn.getvalue()
