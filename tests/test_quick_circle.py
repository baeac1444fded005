"""Tests of the circle `quick` start nothing that takes seconds."""

from __future__ import annotations

import pytest

from tests import quick_circle
from tests.cases import for_each
from tests.quick_circle import is_small

pytest_plugins = ["pytester"]

OPTIONS = ("-ptests.quick_circle", "-pno:cacheprovider", "-pno:rerunfailures", "-pno:asyncio")
TESTS = """
import subprocess, sys
import pytest
from tests import warm

@pytest.fixture
def started():
    subprocess.run([sys.executable, "-c", ""])

def test_process():
    subprocess.run([sys.executable, "-c", ""])

def test_fixture(started):
    pass

@pytest.mark.slow
def test_slow(started):
    pass

def test_import():
    import heavy_package

def test_import_that_is_caught():
    try:
        import heavy_package
    except ImportError:
        pass

def test_small():
    subprocess.run(["true"])
    subprocess.run([sys.executable, "-P", "-c", ""])
"""


@pytest.mark.slow
def test_a_quick_test_that_starts_python_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real packages may have been imported by tests before this one, which is not seen again."""
    monkeypatch.setattr(quick_circle, "HEAVY", {"heavy_package"})
    pytester.makepyfile(TESTS)
    pytester.makepyfile(heavy_package="")
    result = pytester.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.re_match_lines(
        [r"This test starts .*python.*: mark it `slow`.", "This test imports heavy_package: mark it `slow`."]
    )


@for_each("program", ["git", "/usr/bin/git", "sh"])
def test_a_program_of_the_system_is_small(program: str) -> None:
    assert is_small(program)


@for_each("program", ["python3", "/usr/bin/python3", "/x/.venv/bin/flywheel", "/usr/bin/chromium", "/tmp/own"])
def test_python_a_browser_and_own_programs_are_not(program: str) -> None:
    assert not is_small(program)
