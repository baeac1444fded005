"""Whatever a user can get wrong is named, with the reason and the remedy, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    flywheel("run", "--once", "-c", config(tmp_path, text)).fails(78, complaint)


def test_a_judge_that_is_the_trained_model_is_refused(flywheel: Run, tmp_path: Path) -> None:
    flywheel("filter", "-c", config(tmp_path, "sources: []\njudge: {model: my-agent}")).fails(78, "judge.allow_self")


def test_a_directory_that_cannot_be_set_up_is_a_failure(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flywheel("init", tmp_path / "file").fails(1, "Choose a directory that you can write to.")


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
        told = flywheel("filter", "-c", path, "--json", *dry)
    assert ran.code == EXIT_UNAVAILABLE
    assert "OPENAI_API_KEY" in told.err and (key != "refused" or "judge.api_key_env" in told.err)
    assert "no task is due" not in ran.out
    assert "5 due, none judged" in ran.out
    assert (told.json["due"] > 90, told.json["judged"]) == (True, 0)
    if not dry:
        books = flywheel("audit", "-c", path, "--json").json
        assert (books["balanced"], books["rejected"], books["accepted"]) == (True, 0, 0)
    assert flywheel("filter", "-c", config(tmp_path, "sources: []\nstate: {dir: empty}"), *dry).out.startswith(
        "no task is due"
    )


def test_a_server_that_is_away_is_named(flywheel: Run, tmp_path: Path, studio: Path) -> None:
    path = config(tmp_path, f"sources: [{{path: {studio}}}]\nserving: {{urls: ['http://127.0.0.1:9']}}")
    assert flywheel("ingest", "-c", path).code == 0
    flywheel("deploy", "base", "-c", path).fails(1, "127.0.0.1:9", "flywheel serve")


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
    flywheel("ingest", "-c", config(tmp_path, f"state: {{dir: {tmp_path / 'file' / 'state'}}}\nsources: []")).fails(
        1, "state.dir"
    )


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
    flywheel("ingest", "--source", studio, "--out", notes).fails(1, f"append to the task file {notes}")
    assert notes.read_text() == "one long line without a line end"


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


def test_a_named_rubric_that_is_missing_is_not_a_setting_and_a_configured_one_is(
    flywheel: Run, tmp_path: Path
) -> None:
    (tmp_path / "flywheel.yaml").write_text("sources: []\n")
    for command in ("rubric calibrate no.yaml --labels l.jsonl", "filter --dry-run --rubric no.yaml"):
        ran = flywheel(*command.split())
        assert (ran.code, "filter.rubric" in ran.err) == (78, False)
        assert "no.yaml: there is no such file. Name a rubric in YAML." in ran.err
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


def test_status_is_shown_in_one_way_at_a_time(flywheel: Run) -> None:
    for arguments in (["--json", "--watch"], ["--metrics", "--watch"], ["--json", "--metrics"]):
        ran = flywheel("status", *arguments)
        assert ran.code == 2
        assert "one of --json, --metrics and --watch" in " ".join(ran.err.split())


def test_a_source_that_reads_the_task_file_is_a_wrong_configuration(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "flywheel.yaml").write_text("sources: [{type: jsonl, path: home}]\n")
    for command in ("ingest", "run --once", "status"):
        ran = flywheel(*command.split())
        assert (ran.code, "--source" in ran.err) == (78, False), command
        assert "tasks.jsonl is read by the source" in ran.err
    assert "is read by the source" in flywheel("status", "--json").json["error"]
    (tmp_path / "flywheel.yaml").unlink()
    for option, arguments in (
        ("--source", ("--source", "home/tasks.jsonl")),
        ("--out", ("--source", "x.sqlite", "--out", "x.sqlite")),
    ):
        flywheel("ingest", *arguments).fails(2, f"Invalid value for {option}")
    assert not (tmp_path / "x.sqlite").exists()
