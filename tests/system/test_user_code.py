"""Functions of users' files that hang, crash, leave, print or are left behind: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import ConfigError
from flywheel.system.limited_call import FunctionError
from flywheel.system.user_code import PythonProcess, ReturnedValue, function_of
from tests.factories.time_limit import runs_out_when
from tests.factories.user_file import FILE, keep_process
from tests.waiting import wait_for


def has_text(path: Path) -> bool:
    return path.exists() and path.read_text() != ""


@pytest.mark.parametrize(
    ("said", "value"),
    [(True, True), (0.25, 0.25), (2, 2.0), (None, None), ("yes", None), (float("inf"), float("inf"))],
)
def test_what_is_returned_comes_as_it_is(said: Any, value: Any) -> None:
    assert keep_process()({"do": "", "say": said}) == ReturnedValue(value, None, repr(said))


@pytest.mark.slow
def test_what_a_file_remembers_it_remembers_until_its_process_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_out_when(monkeypatch, lambda: has_text(tmp_path / "pid"))
    keep = keep_process(seconds=1)
    assert [keep({"do": ""}).value for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(FunctionError, match="keep ran longer than 1 s"):
        keep({"do": "hang", "pid": str(tmp_path / "pid")})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert keep({"do": ""}).value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("do", ["hang", "crash", "leave"])
def test_what_a_function_has_started_ends_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    """Else each call that takes too long would leave a program behind."""
    runs_out_when(monkeypatch, lambda: has_text(tmp_path / "pid"))
    keep = keep_process(seconds=1)
    with pytest.raises(FunctionError):
        keep({"do": do, "pid": str(tmp_path / "pid"), "grandchild": str(tmp_path / "grandchild")})
    _wait_for_end(tmp_path / "grandchild")


def test_what_a_function_has_started_ends_when_nobody_asks_it_any_more(tmp_path: Path) -> None:
    keep = keep_process()
    keep({"do": "", "grandchild": str(tmp_path / "grandchild")})
    assert _runs(int((tmp_path / "grandchild").read_text()))
    keep.close()
    _wait_for_end(tmp_path / "grandchild")


@pytest.mark.parametrize(
    ("do", "complaint"), [("crash", "SIGSEGV"), ("leave", "exit code 3"), ("exit", "SystemExit: enough")]
)
def test_one_that_ends_its_process_costs_one_call(do: str, complaint: str) -> None:
    keep = keep_process()
    with pytest.raises(FunctionError, match=complaint):
        keep({"do": do})
    assert keep({"do": "", "say": True}).value is True


def test_what_it_prints_and_reads_is_not_ours(capfd: pytest.CaptureFixture[str]) -> None:
    assert keep_process()({"do": "talk"}) == ReturnedValue(True, "read to the end", repr((True, "read to the end")))
    out, err = capfd.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if line] == ["printed", "written", "by another program"]


def test_signals_to_all_of_us_leave_the_call_alone() -> None:
    assert keep_process()({"do": "signal", "say": True}).value is True


def test_calls_do_not_wait_for_each_other_while_there_may_be_more_processes(tmp_path: Path) -> None:
    keep = keep_process(most=2)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    told: list[ReturnedValue] = []
    threads = [
        threading.Thread(target=lambda m=mine, o=other: told.append(keep({"do": "meet", "mine": m, "other": o})))
        for mine, other in ((one, two), (two, one))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 2


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import no_such_module", "no_such_module"),
        ("def other(task): pass", "no function keep"),
        ("import os; os._exit(0)", "ended its process"),
        ("def keep(:", "SyntaxError"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_a_file_that_does_not_load_is_told(source: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        keep_process(source=source)


@pytest.mark.slow
def test_a_file_that_hangs_while_it_loads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.system.user_code.LOAD_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="it ran longer than 1 s"):
        keep_process(source="while True: pass")


def test_modules_of_ours_are_found_and_files_beside_the_user_are_not_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong one')")
    (tmp_path / "flywheel.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert keep_process(source="import flywheel.errors\ndef keep(task):\n    return True\n")({}).value is True


def test_the_same_function_has_one_process_while_somebody_has_it() -> None:
    def function() -> PythonProcess:
        return function_of(FILE, Path("mine.py"), "keep", attempted="load it", seconds=60)

    first = function()
    assert function() is first
    assert first({"do": ""}).value == 1.0
    del first
    assert function()({"do": ""}).value == 1.0


def test_a_close_during_a_call_ends_its_process_after_the_call(tmp_path: Path) -> None:
    keep = keep_process()
    pid = int(keep({"do": "pid"}).value or 0)
    mine, other = tmp_path / "mine", tmp_path / "other"
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(keep, {"do": "meet", "mine": str(mine), "other": str(other), "say": 7})
        wait_for(mine.exists, "the call", seconds=60)
        keep.close()
        other.touch()
        assert call.result().value == 7.0
    assert not _runs(pid)


PARENT = """
import sys
from tests.factories.user_file import keep_process
keep_process()({"do": "hang", "pid": sys.argv[1], "grandchild": sys.argv[2]})
"""


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    pid, grandchild = tmp_path / "pid", tmp_path / "grandchild"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(pid), str(grandchild)])
    wait_for(lambda: pid.exists() and pid.read_text(), "the call")
    parent.kill()
    parent.wait()
    _wait_for_end(pid)
    _wait_for_end(grandchild)


def _wait_for_end(pid_file: Path) -> None:
    wait_for(lambda: not _runs(int(pid_file.read_text())), "the end of the process")


def _runs(pid: int) -> bool:
    """Whether there is such a process that is not only waiting to be looked at by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
