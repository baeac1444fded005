"""Whatever a user can get wrong is named, with the reason and the remedy, and nothing is lost."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.errors import EXIT_UNAVAILABLE
from tests.cli.conftest import Run
from tests.factories.judge_server import JudgeServer
from tests.factories.state import execute

STUDIO = Path(__file__).parent.parent / "data" / "studio"


def config(folder: Path, text: str) -> Path:
    path = folder / "flywheel.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def studio(tmp_path: Path) -> Path:
    return Path(shutil.copy(STUDIO / "new_v2.sqlite", tmp_path / "studio.sqlite"))


def make_bad(kind: str, path: Path) -> None:
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "directory":
        path.mkdir()
    elif kind == "not SQLite":
        path.write_bytes(b"a text file, and not a short one " * 100)
    elif kind == "not Studio":
        execute(path, "CREATE TABLE songs (title)")


@pytest.mark.parametrize("kind", ["missing", "empty", "directory", "not SQLite", "not Studio"])
def test_a_source_that_is_none_fails_alone(flywheel: Run, tmp_path: Path, studio: Path, kind: str) -> None:
    bad = tmp_path / "bad.sqlite"
    make_bad(kind, bad)
    ran = flywheel("ingest", "--source", bad, "--source", studio, "--json")
    assert ran.code == 1
    assert str(bad) in ran.err
    assert ran.err.startswith("flywheel: cannot ")
    assert len(ran.err.splitlines()) == 1
    first, second = ran.json["sources"]
    assert first["error"]
    assert "error" not in second
    assert second["tasks"] > 90


@pytest.mark.slow
def test_a_locked_source_says_so_and_is_read_later(flywheel: Run, studio: Path) -> None:
    holder = sqlite3.connect(studio, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    ran = flywheel("ingest", "--source", studio, "--json")
    assert ran.code == 1
    assert "locked" in ran.err
    holder.execute("ROLLBACK")
    holder.close()
    ran = flywheel("ingest", "--source", studio, "--json")
    assert ran.code == 0
    assert ran.json["new"] > 90


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sources: [", "not YAML: line 1, column 11: while parsing a flow node, expected the node content"),
        ("sourcs: []", "did you mean `sources`"),
        ("judge: {max_threads: 4}", "did you mean `max_thread`"),
        ("filter: {rubric: none.yaml}", "none.yaml"),
    ],
)
def test_a_wrong_configuration_ends_with_78(flywheel: Run, tmp_path: Path, text: str, complaint: str) -> None:
    ran = flywheel("run", "--once", "-c", config(tmp_path, text))
    assert ran.code == 78
    assert complaint in ran.err


def test_a_judge_that_is_the_trained_model_is_refused(flywheel: Run, tmp_path: Path) -> None:
    ran = flywheel("filter", "-c", config(tmp_path, "sources: []\njudge: {model: my-agent}"))
    assert ran.code == 78
    assert "judge.allow_self" in ran.err


def test_a_directory_that_cannot_be_set_up_is_a_failure(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = flywheel("init", tmp_path / "file")
    assert ran.code == 1
    assert "Choose a directory that you can write to." in ran.err


def test_usage_errors_end_with_2(flywheel: Run) -> None:
    assert flywheel("ingest", "--no-such-option").code == 2
    assert flywheel("filter", "--limit", "none").code == 2
    assert flywheel("--log-level", "LOUD", "status").code == 2


def judge_config(folder: Path, studio: Path, url: str) -> Path:
    return config(
        folder,
        f"sources: [{{path: {studio}}}]\n"
        f"judge: {{base_url: '{url}', model: judge, max_attempts: 1, max_thread: 4}}\n",
    )


@pytest.mark.slow
def test_an_unreachable_judge_costs_nothing_but_delay(flywheel: Run, tmp_path: Path, studio: Path) -> None:
    path = judge_config(tmp_path, studio, "http://127.0.0.1:9/v1")
    ran = flywheel("filter", "-c", path, "--json")
    assert ran.code == EXIT_UNAVAILABLE
    assert "127.0.0.1:9" in ran.err
    assert {v["outcome"] for v in ran.json["verdicts"] if not v["failed"]} == {"undecided"}
    assert ran.json["usage"]["calls"] == 0
    books = flywheel("audit", "-c", path, "--json").json
    assert books["balanced"]
    assert books["pending"] + books["undecided"] > 90
    assert books["task_states"].get("judging", 0) == 0


def test_a_wrong_key_names_the_setting_and_leaves_everything_pending(
    flywheel: Run, tmp_path: Path, studio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JudgeServer(behaviour="401") as judge:
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        path = judge_config(tmp_path, studio, judge.base_url)
        ran = flywheel("filter", "-c", path, "--json")
    assert ran.code == EXIT_UNAVAILABLE
    assert "judge.api_key_env" in ran.err
    assert "OPENAI_API_KEY" in ran.err
    books = flywheel("audit", "-c", path, "--json").json
    assert books["balanced"]
    assert books["rejected"] == books["accepted"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("key", ["schl\u00fcssel", "refused"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_tasks_that_nobody_could_be_asked_about_are_due_still(
    flywheel: Run, tmp_path: Path, studio: Path, monkeypatch: pytest.MonkeyPatch, key: str, dry: list[str]
) -> None:
    with JudgeServer(behaviour="401") as judge:
        monkeypatch.setenv("OPENAI_API_KEY", key)
        path = judge_config(tmp_path, studio, judge.base_url)
        # Tasks that a check decides are none that the judge is asked about.
        path.write_text(path.read_text() + "filter: {rubric: rubric.yaml}\n")
        (tmp_path / "rubric.yaml").write_text("id: r\ncriteria: [{id: good, value: It is right.}]\n")
        ran = flywheel("filter", "-c", path, "--limit", "5", *dry)
        told = flywheel("filter", "-c", path, "--json", *dry).json
    assert ran.code == EXIT_UNAVAILABLE
    assert "no task is due" not in ran.out
    assert "5 due, none judged" in ran.out
    assert told["due"] > 90
    assert told["judged"] == 0
    assert flywheel("filter", "-c", config(tmp_path, "sources: []\nstate: {dir: empty}"), *dry).out.startswith(
        "no task is due"
    )


def test_a_server_that_is_away_is_named(flywheel: Run, tmp_path: Path, studio: Path) -> None:
    path = config(tmp_path, f"sources: [{{path: {studio}}}]\nserving: {{urls: ['http://127.0.0.1:9']}}")
    assert flywheel("ingest", "-c", path).code == 0
    ran = flywheel("deploy", "base", "-c", path)
    assert ran.code == 1
    assert "127.0.0.1:9" in ran.err
    assert "flywheel serve" in ran.err


def test_why_of_an_unknown_id(flywheel: Run) -> None:
    ran = flywheel("why", "r0042")
    assert ran.code == 1
    assert "r0042" in ran.err


def test_a_second_instance_ends_with_75(flywheel: Run, tmp_path: Path) -> None:
    from flywheel.system.lock import instance_lock

    (tmp_path / "flywheel.yaml").write_text("sources: []\n")
    with instance_lock(tmp_path / "home"):
        for command in (["ingest"], ["filter"], ["run", "--once"], ["round"]):
            ran = flywheel(*command)
            assert ran.code == 75, command
            assert "flywheel status" in ran.err
        assert flywheel("status").code == 0


def test_a_state_directory_that_cannot_be_written(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = flywheel("ingest", "-c", config(tmp_path, f"state: {{dir: {tmp_path / 'file' / 'state'}}}\nsources: []"))
    assert ran.code == 1
    assert "state.dir" in ran.err


@pytest.mark.slow
def test_a_full_disk_loses_nothing(flywheel: Run, tmp_path: Path, studio: Path) -> None:
    """A limit on the size of files stands for the full disk: writes fail in the middle of the pass."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    command = [sys.executable, "-m", "flywheel", "ingest", "--source", str(studio)]
    failed = subprocess.run(command, preexec_fn=small_files, capture_output=True, text=True, timeout=300, check=False)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert "flywheel: cannot" in failed.stderr
    ran = flywheel("ingest", "--source", studio, "--json")
    assert ran.code == 0
    lines = (tmp_path / "home" / "tasks.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)) == ran.json["tasks"]
    assert flywheel("audit", "--json").json["balanced"]


@pytest.mark.slow
def test_tasks_are_not_appended_to_what_is_read(flywheel: Run, tmp_path: Path, studio: Path) -> None:
    lines = tmp_path / "lines" / "a.jsonl"
    lines.parent.mkdir()
    lines.write_text('{"question": "q", "answer": "a"}\n{"question": "torn')
    (tmp_path / "link.jsonl").symlink_to(lines)
    before = lines.read_bytes(), studio.read_bytes()
    reading = f"sources: [{{type: jsonl, path: lines}}, {{path: '{studio}'}}]\n"
    for output in ("lines/a.jsonl", "lines/new.jsonl", "link.jsonl", "studio.sqlite"):
        ran = flywheel("ingest", "-c", config(tmp_path, f"{reading}ingest: {{output: {output}}}\n"))
        assert ran.code == 78, output
        assert "ingest.output" in ran.err
        ran = flywheel("ingest", "-c", config(tmp_path, reading), "--out", output)
        assert ran.code == 2, output
        assert "--out" in ran.err
    assert (lines.read_bytes(), studio.read_bytes()) == before
    assert flywheel("ingest", "-c", config(tmp_path, reading), "--out", "lines/new.txt").code == 0


def test_a_file_named_by_mistake_keeps_every_byte(flywheel: Run, tmp_path: Path, studio: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("one long line without a line end")
    ran = flywheel("ingest", "--source", studio, "--out", notes)
    assert ran.code == 1
    assert f"append to the task file {notes}" in ran.err
    assert notes.read_text() == "one long line without a line end"
