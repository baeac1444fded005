"""Files that a command line names and that cannot be used: 78 with the file's name and a remedy that fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.factories.state import execute


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """Root may read everything, so somebody else looks."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


COMMANDS = (
    "status -c mine.yaml",
    "filter --dry-run -c mine.yaml",
    "filter --dry-run --rubric mine.yaml",
    "filter --against mine.yaml",
    "rubric check mine.yaml",
    "rubric calibrate mine.yaml --labels labels.jsonl",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_may_not_be_read_is_a_wrong_file(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("FLYWHEEL_HOME", "home")  # the folders above may not be entered by everybody
    (tmp_path / "flywheel.yaml").write_text("sources: []\n")
    (tmp_path / "flywheel.yaml").chmod(0o644)
    flywheel(*command.split())  # what has to be imported is, while everything may be read
    file = tmp_path / "mine.yaml"
    file.write_text("{}")
    file.chmod(0)
    tmp_path.chmod(0o755)
    with as_somebody_else():
        ran = flywheel(*command.split())
    assert ran.code == 78
    assert "mine.yaml" in ran.err + ran.out
    assert "Permission denied" in ran.err + ran.out


@pytest.mark.parametrize(
    "command", ["rubric calibrate no.yaml --labels l.jsonl", "filter --dry-run --rubric no.yaml"]
)
def test_a_named_rubric_that_is_missing_is_not_a_setting(flywheel: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "flywheel.yaml").write_text("sources: []\n")
    ran = flywheel(*command.split())
    assert ran.code == 78
    assert "no.yaml: there is no such file. Name a rubric in YAML." in ran.err
    assert "filter.rubric" not in ran.err


def test_a_configured_rubric_that_is_missing_is_a_setting(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text("sources: []\nfilter: {rubric: no.yaml}\n")
    assert "Correct filter.rubric on line 2 of flywheel.yaml." in flywheel("filter", "--dry-run").err


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ("UPDATE meta SET value = 'another' WHERE key = 'schema_hash'", "move the state directory away"),
        ("UPDATE meta SET value = 99 WHERE key = 'schema_version'", "Upgrade Flywheel"),
    ],
)
def test_a_state_of_another_version_says_what_helps(flywheel: Run, tmp_path: Path, change: str, remedy: str) -> None:
    assert flywheel("ingest", "-c", sourceless(tmp_path)).code == 0
    execute(tmp_path / "state" / "state.db", change)
    ran = flywheel("status", "-c", sourceless(tmp_path))
    assert ran.code == 1
    assert remedy in ran.err
    assert "run --once" not in ran.err


def sourceless(folder: Path) -> Path:
    path = folder / "mine.yaml"
    path.write_text("state: {dir: state}\nsources: []\n")
    return path


@pytest.mark.parametrize(
    "arguments", [["--json", "--watch"], ["--metrics", "--watch"], ["--json", "--metrics"]], ids=" ".join
)
def test_status_is_shown_in_one_way_at_a_time(flywheel: Run, arguments: list[str]) -> None:
    ran = flywheel("status", *arguments)
    assert ran.code == 2
    assert "one of --json, --metrics and --watch" in " ".join(ran.err.split())


@pytest.mark.parametrize("command", ["ingest", "run --once", "status"])
def test_a_source_that_reads_the_task_file_is_a_wrong_configuration(
    flywheel: Run, tmp_path: Path, command: str
) -> None:
    (tmp_path / "flywheel.yaml").write_text("sources: [{type: jsonl, path: home}]\n")
    ran = flywheel(*command.split())
    assert ran.code == 78
    assert "tasks.jsonl is read by the source" in ran.err
    assert "--source" not in ran.err
    if command != "run --once":
        assert "is read by the source" in flywheel(*command.split(), "--json").json["error"]


def test_an_option_that_makes_a_source_of_the_task_file_is_wrong_usage(flywheel: Run, tmp_path: Path) -> None:
    for option, arguments in (
        ("--source", ("--source", "home/tasks.jsonl")),
        ("--out", ("--source", "x.sqlite", "--out", "x.sqlite")),
    ):
        ran = flywheel("ingest", *arguments)
        assert ran.code == 2
        assert f"Invalid value for {option}" in ran.err
    assert not (tmp_path / "x.sqlite").exists()
