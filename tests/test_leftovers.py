"""What a test leaves is named, and the run fails."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import leftovers

pytest_plugins = ["pytester"]

TESTS = """
import socket, subprocess, threading

def test_socket(kept):
    kept.enter_context(socket.create_server(("127.0.0.1", 0)))

def test_process(kept):
    kept.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

def test_thread(kept):
    released = threading.Event()
    thread = threading.Thread(target=released.wait, name="idle")
    thread.start()
    kept.callback(thread.join)
    kept.callback(released.set)

def test_nothing():
    with socket.create_server(("127.0.0.1", 0)):
        pass
"""
OF_A_SESSION = """
import socket
import pytest

@pytest.fixture(scope="session")
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run inside has a TMPDIR below that of this run, and waits for nothing."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(leftovers, "END_SECONDS", 0)


class Kept:
    """A plugin with the fixture that keeps what tests leave, until this test has seen what is said of it."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    @pytest.fixture
    def kept(self) -> ExitStack:
        return self.stack


def run(pytester: pytest.Pytester) -> pytest.RunResult:
    without = ("cacheprovider", "asyncio", "rerunfailures")
    options = ("-ptests.leftovers", *(f"-pno:{name}" for name in without))
    kept = Kept()
    with kept.stack:
        return pytester.runpytest_inprocess(*options, plugins=[kept])


def test_each_thing_is_named_with_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_leaves=TESTS)
    result = run(pytester)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.re_match_lines_random(
        [
            r".*a socket that listens on .* is left by .*test_leaves.py::test_socket",
            r".*process \d+ \(cat\) is left by .*test_leaves.py::test_process",
            r".*the thread 'idle' is left by .*test_leaves.py::test_thread",
        ]
    )
    result.stdout.no_re_match_line(r".* is left by .*(test_nothing|fixture)")


def test_what_a_wider_fixture_holds_may_stay(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(OF_A_SESSION)
    pytester.makepyfile(test_a="def test_a(server): pass", test_b="def test_b(server): pass")
    result = run(pytester)
    result.assert_outcomes(passed=2)


def test_a_file_outside_the_folder_and_a_process_fail_the_run(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(
        test_leaves=f"""
        import os, pathlib, signal, subprocess

        def test_leaves(kept):
            pathlib.Path({str(tmp_path)!r}, "flywheel-left").touch()
            orphan = subprocess.check_output(["sh", "-c", "sleep 600 >/dev/null & echo $!"], text=True)
            kept.callback(os.kill, int(orphan), signal.SIGKILL)
        """
    )
    result = run(pytester)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines_random([r"process \d+ \(sleep 600\)", r".*/flywheel-left, outside TMPDIR"])
