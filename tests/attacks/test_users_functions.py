"""Functions of users that misbehave: each costs its own call, in the time that it has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flywheel.system.limited_call import FunctionError
from flywheel.system.user_code import PythonProcess
from tests.cases import for_each
from tests.factories.time_limit import never_runs_out

EVERY_FILE = """
import os, time
def f(task):
    for number in range(3, 4096):
        try:
            os.write(number, {text!r})
        except OSError:
            pass
    {then}
"""
FORGED = b'{"value": true, "reason": null, "shown": "forged"}\n'

TOO_LONG = "ran longer than 2 s"

FAIL = [
    ("hangs", "import time\ndef f(task): time.sleep(1000)", TOO_LONG),
    ("begins an answer", EVERY_FILE.format(text=b"{", then="time.sleep(1000)"), TOO_LONG),
    ("begins a long answer", EVERY_FILE.format(text=b"{" * 24, then="time.sleep(1000)"), "something else"),
    ("forges an answer", EVERY_FILE.format(text=FORGED, then="return False"), "something else"),
    ("forges a length", EVERY_FILE.format(text=bytes(24), then="return False"), "something else"),
    ("writes a line", EVERY_FILE.format(text=b"not json\n", then="return False"), "f "),
    ("closes files", "import os\ndef f(task): os.closerange(3, 4096)", "ended its process"),
    ("exits", "import os\ndef f(task): os._exit(3)", "exit code 3"),
    ("crashes", "import ctypes\ndef f(task): ctypes.string_at(0)", "SIGSEGV"),
    ("stops", "import os, signal\ndef f(task): os.kill(os.getpid(), signal.SIGSTOP)", TOO_LONG),
    ("recurses", "def f(task): return f(task)", "RecursionError"),
    ("has no repr", "class A:\n  def __repr__(self): raise ValueError('r')\ndef f(task): return A()", "ValueError"),
    ("is infinite", "def f(task): return 10**400", "OverflowError"),
]


@pytest.mark.slow
@for_each("source, why", [(source, why) for _, source, why in FAIL])
def test_a_call_that_fails_says_why_and_the_next_one_is_answered(source: str, why: str) -> None:
    function = PythonProcess(
        f"{source}\ng = f\ndef f(task): return True if task['good'] else g(task)",
        Path("mine.py"),
        "f",
        attempted="load mine.py",
        seconds=2,
    )
    with pytest.MonkeyPatch.context() as changed:
        if why != TOO_LONG:
            never_runs_out(changed)
        with pytest.raises(FunctionError, match=why):
            function({"good": False})
        never_runs_out(changed)
        assert function({"good": True}).value is True
    function.close()


def test_a_reason_without_end_is_cut() -> None:
    source = "def f(task): return True, 'x' * 50_000_000"
    function = PythonProcess(source, Path("mine.py"), "f", attempted="load mine.py", seconds=60)
    assert len(function({}).reason or "") == 10_000
    function.close()


def test_keys_are_in_no_environment_that_a_function_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_JUDGE_API_KEY", "sk-of-the-judge-123456")
    source = "import os\ndef f(task): return 'A_JUDGE_API_KEY' in os.environ"
    function = PythonProcess(source, Path("mine.py"), "f", attempted="load mine.py", seconds=60)
    assert "A_JUDGE_API_KEY" in os.environ
    assert function({}).value is False
    function.close()
