"""Where output goes: a full disk, a reader that leaves, another encoding, nowhere; and odd surroundings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.cli.conftest import Run
from tests.sources.studio.writer import DATA

COMMANDS = (
    ["--help"],
    ["status"],
    ["status", "--json"],
    ["status", "--metrics"],
    ["audit"],
    ["config", "schema", "rubric"],
    ["dead-letters"],
)
EACH_COMMAND = pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=" ".join(command), marks=() if command == ["status"] else pytest.mark.extended)
        for command in COMMANDS
    ],
)
SETTINGS = json.dumps({"state": {"dir": "state"}, "sources": [{"path": str(DATA / "old.sqlite")}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flywheel.yaml").write_text(SETTINGS)
    return tmp_path


@pytest.fixture
def ingested(folder: Path, flywheel: Run) -> Path:
    assert flywheel("ingest").code == 0
    return folder


def run(folder: Path, shell: str, **environment: str | None) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell, in which `flywheel` is the command."""
    kept = {name: value for name, value in (os.environ | environment).items() if value is not None}
    # Buffered, as for everybody.
    kept["PYTHONUNBUFFERED"] = ""
    line = shell.replace("flywheel", f"{sys.executable} -m flywheel", 1)
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=kept, capture_output=True, timeout=120, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert b"Exception ignored" not in done.stderr, done.stderr.decode()
    return done


@pytest.mark.slow
@EACH_COMMAND
def test_a_full_disk_is_named(ingested: Path, command: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        ran = warm.run(
            [sys.executable, "-m", "flywheel", *command],
            cwd=ingested,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
        )
    assert ran.returncode == 1
    assert ran.stderr.startswith(b"flywheel: cannot write to stdout: No space left on device.")


@pytest.mark.slow
@EACH_COMMAND
def test_a_reader_that_goes_away_is_no_error_of_ours(ingested: Path, command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = warm.run(
            [sys.executable, "-m", "flywheel", *command],
            cwd=ingested,
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_a_closed_stdout(ingested: Path) -> None:
    assert run(ingested, "flywheel status >&-").returncode == 0
    for command in ("status --metrics", "export --format verl --state all --split all --out -"):
        ran = run(ingested, f"flywheel {command} >&-")
        assert ran.returncode == 1
        assert b"cannot write to stdout: it is closed" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["docs cli >&-", "init new <&-"])
def test_a_closed_stream_is_no_terminal(tmp_path: Path, command: str) -> None:
    ran = run(tmp_path, f"flywheel {command}")
    assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.slow
def test_a_full_stderr_leaves_the_exit_code(folder: Path) -> None:
    assert run(folder, "flywheel status -c none.yaml 2>/dev/full").returncode == 78
    assert run(folder, "flywheel filter --estimate 2>/dev/full").returncode == 0


@pytest.mark.slow
def test_a_closed_stderr_puts_nothing_beside_what_programs_read(ingested: Path) -> None:
    ran = run(ingested, "flywheel status --json -c none.yaml 2>&-")
    assert ran.returncode == 78
    assert set(json.loads(ran.stdout)) == {"error"}
    ran = run(ingested, "flywheel ingest --json --source none.sqlite 2>&-")
    assert ran.returncode == 1
    assert "sources" in json.loads(ran.stdout)
    whole = run(ingested, "flywheel export --format agentjet --state all --out -")
    assert b" lines in stdout " in whole.stderr
    ran = run(ingested, "flywheel export --format agentjet --state all --out - 2>&-")
    assert (ran.returncode, ran.stdout) == (0, whole.stdout)


@pytest.mark.slow
def test_the_daemon_works_without_standard_streams(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    settings = {
        "state": {"dir": "state"},
        "sources": [{"type": "jsonl", "path": "lines"}],
        "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "j"},
        "daemon": {"metrics": None},
        "notify": [{"command": ["sh", "-c", "echo written >&2"], "on": ["source_error"]}],
    }
    (tmp_path / "flywheel.yaml").write_text(json.dumps(settings))
    for closed in ("2>&-", "0<&- >&- 2>&-"):
        assert run(tmp_path, f"flywheel run --once {closed}").returncode == 0
        # Nothing else has the numbers of the streams, into which children write.
        assert run(tmp_path, "flywheel audit").returncode == 0
    opened = "import os; from flywheel.cli.app import _fill_closed as fill; fill(); print(os.open('x', os.O_CREAT))"
    shell = ["sh", "-c", f'exec {sys.executable} -c "{opened}" 2>&- 0<&-']
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    assert int(done.stdout) > 2


@pytest.mark.slow
def test_json_is_exact_on_a_terminal_of_another_encoding(flywheel: Run, folder: Path) -> None:
    line = {"question": "→ 什么 \ud83d", "answer": "é"}
    (folder / "lines.jsonl").write_text(json.dumps(line) + "\n")
    settings = {"state": {"dir": "state"}, "sources": [{"type": "jsonl", "path": "lines.jsonl"}]}
    (folder / "flywheel.yaml").write_text(json.dumps(settings))
    assert flywheel("ingest").code == 0
    expected = flywheel("tasks", "--state", "pending", "--json").json
    for encoding in ("latin-1", "ascii"):
        ran = run(folder, "flywheel tasks --state pending --json", PYTHONIOENCODING=encoding)
        assert json.loads(ran.stdout.decode(encoding)) == expected
    ran = run(folder, "flywheel tasks --state pending", PYTHONIOENCODING="ascii")
    assert (ran.returncode, b"1 pending" in ran.stdout) == (0, True)
    assert "→ 什么" in expected["tasks"][0]["query"]
    metrics = run(folder, "flywheel status --metrics", PYTHONIOENCODING="ascii")
    assert metrics.returncode == 0


@pytest.mark.slow
def test_help_needs_no_home_directory(folder: Path) -> None:
    script = (
        "import pwd, sys\n"
        "def unknown(uid): raise KeyError\n"
        "pwd.getpwuid = unknown\n"
        "from flywheel.cli import main\n"
        "sys.argv[0] = 'flywheel'\n"
        "main()\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "FLYWHEEL_HOME")}
    for arguments, code in ((["--help"], 0), (["status", "-c", "empty.yaml"], 78)):
        (folder / "empty.yaml").write_text("")
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=folder,
            env=kept,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert ("home directory" in done.stderr) == (code == 78)


@pytest.mark.slow
def test_a_current_directory_that_is_gone(folder: Path) -> None:
    settings = folder / "flywheel.yaml"
    settings.write_text(SETTINGS.replace('"state"}', f'"{folder}/state"}}'))
    for arguments, code in (("status", 0), ("ingest --source x.sqlite", 78), ("ingest --out x.jsonl", 78)):
        ran = run(folder, f"mkdir gone && cd gone && rmdir ../gone && flywheel {arguments} -c {settings}")
        assert ran.returncode == code, ran.stderr
        assert (b"Name the whole path" in ran.stderr) == (code == 78)


@pytest.mark.parametrize("source", ["~no-such-user-here/x", "x" * 300])
def test_a_path_that_no_file_can_have_is_named(flywheel: Run, folder: Path, source: str) -> None:
    for arguments in (["ingest", "--source", source], ["ingest", "--out", source]):
        ran = flywheel(*arguments)
        assert ran.code == 78
        assert ran.err.startswith("flywheel: cannot use a path: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status", "-c", "none.yaml"], 78),
        (["why", "r0042"], 1),
        (["rubric", "calibrate", "none.yaml", "--labels", "none.jsonl"], 78),
        (["export", "--format", "trl-sft", "--out", "x"], 1),
    ],
)
def test_with_json_an_error_is_an_object_too(flywheel: Run, folder: Path, arguments: list[str], code: int) -> None:
    flywheel("ingest")
    ran = flywheel(*arguments, "--json")
    assert ran.code == code
    assert ran.err == f"flywheel: {ran.json['error']}\n"
    assert flywheel(*arguments).out == ""


@pytest.mark.parametrize("home", ["", "/"])
def test_no_path_is_below_a_home_that_is_the_root(
    flywheel: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    assert str(folder / "state") in flywheel("status").out
    monkeypatch.setenv("HOME", str(folder))
    assert "~/state" in flywheel("status").out
