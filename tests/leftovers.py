"""What tests leave behind: processes, threads, listening sockets, files. A pytest plugin.

After each module, what its tests left beyond the fixtures of a wider scope is an error that names the test. After the
run, processes with the run's TMPDIR and files outside it are looked for.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests import warm

ROOT: Final = Path(__file__).parent.parent
PREFIXES: Final = ("flywheel-", "fw-", ".flywheel-")
"""Of the folders and files that the program makes where temporary files go."""
END_SECONDS: Final = 30.0
"""How long a process or thread that was told to end may take."""

Found = dict[Any, str]
"""What was found, by its identity: a description."""


def listening() -> Found:
    """Sockets of this process that listen, by their inode."""
    found: Found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[target] = f"a socket that listens on {copy.getsockname()}"
        except OSError:
            continue
    return found


def threads() -> Found:
    """Threads that would keep this process from ending."""
    running = (each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread())
    return {each.ident: f"the thread {each.name!r}" for each in running}


def children() -> Found:
    """Processes that this one started, but for those that serve it until its end."""
    found: Found = {}
    for child in psutil.Process().children():
        try:
            command, started = child.cmdline(), child.create_time()
            if (
                child.status() == psutil.STATUS_ZOMBIE
                or child.pid in warm.servers()
                or "resource_tracker" in str(command)
            ):
                continue
        except psutil.NoSuchProcess:
            continue
        found[child.pid, started] = f"process {child.pid} ({' '.join(command)[:150]})"
    return found


def everything() -> Found:
    return children() | threads() | listening()


class Leftovers:
    """Knows which test was running when something began."""

    def __init__(self) -> None:
        self._of_wider_fixtures: set[Any] = set()
        self._before: Collection[Any] = ()
        self._pids: set[int] = set()
        self._first_seen: dict[Any, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        before = everything()
        try:
            return (yield)
        finally:
            self._of_wider_fixtures |= everything().keys() - before.keys()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            found = threads() | listening()
            # Looking at every process of the machine takes too long for each of thousands of tests.
            pids = set(psutil.pids())
            if pids - self._pids:
                found |= children()
            self._pids = pids
            for each in found:
                self._first_seen.setdefault(each, item.nodeid)

    def begin_module(self) -> None:
        self._first_seen.clear()
        self._before = everything().keys()

    def left(self) -> list[str]:
        """What is left now, with the test that left it."""
        return [
            f"{what} is left by {self._first_seen.get(identity, 'a fixture')}"
            for identity, what in everything().items()
            if identity not in self._before and identity not in self._of_wider_fixtures
        ]


def end_idle_children() -> None:
    """What keeps children for its next use, until this process ends, starts new ones then."""
    if python_check := sys.modules.get("flywheel.judge.rubric.checks.python_check"):
        python_check.load.cache_clear()
    for name in ("flywheel.judge.rubric.checks.math_equal", "flywheel.system.limited_call"):
        idle = sys.modules[name]._children._idle if name in sys.modules else []
        while idle:
            idle.pop().end()


LEFTOVERS = pytest.StashKey[Leftovers]()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(pytestconfig: pytest.Config) -> Iterator[None]:
    """The first fixture of a module, and so the last that ends.

    Garbage is collected here, so that a warning of what was not closed is an error of this module, not of a later.
    """
    leftovers = pytestconfig.stash[LEFTOVERS]
    leftovers.begin_module()
    yield
    end_idle_children()
    gc.collect()
    if pytestconfig.getoption("leftovers") == "report":
        return
    end = time.monotonic() + END_SECONDS
    while left := leftovers.left():
        if time.monotonic() > end:
            pytest.fail("\n".join(left), pytrace=False)
        time.sleep(0.05)


class Run:
    """The folder for temporary files of one run, and what is left outside it or running in the end."""

    def __init__(self, outside: Path, folder: Path) -> None:
        self._places = {outside, Path("/dev/shm"), Path("/var/tmp")}
        self._folder = folder
        self._files = self._ours()
        self._status = git_status()
        self.left: list[str] = []

    def _ours(self) -> set[Path]:
        return {
            path
            for place in self._places
            if place.is_dir()
            for path in place.iterdir()
            if path.name.startswith(PREFIXES)
        }

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("TMPDIR", "").startswith(str(self._folder))
                if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    yield f"process {process.pid} ({' '.join(process.cmdline())[:150]})"
            except psutil.Error:
                continue

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """After the workers of a divided run have ended. What git sees counts where nobody edits meanwhile: in CI."""
        yield
        end = time.monotonic() + END_SECONDS
        while (running := list(self._processes())) and time.monotonic() < end:
            time.sleep(0.2)
        self.left = [*running, *(f"{path}, outside TMPDIR" for path in sorted(self._ours() - self._files))]
        changed = sorted(git_status() ^ self._status)
        if os.environ.get("CI"):
            self.left += [f"git status: {line}" for line in changed]
        fails = session.config.getoption("leftovers") == "fail"
        if self.left and fails and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if session.exitstatus == pytest.ExitCode.OK:
            shutil.rmtree(self._folder, ignore_errors=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.section("left behind")
            for each in self.left:
                terminalreporter.line(each, red=True)


def git_status() -> set[str]:
    try:
        shown = subprocess.run(
            ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return set()
    return set(shown.stdout.splitlines())


def new_folder() -> tuple[Path, Path]:
    """Where temporary files went so far, and where those of this run go: a short path, as sockets need."""
    outside = Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="fw"))
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    return outside, folder


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "whether what a module or the run leaves is a failure; with `report`, what the run leaves is only shown"
    parser.addoption("--leftovers", choices=("fail", "report"), default="fail", help=about)


def pytest_collection_finish() -> None:
    """What exists by now is no garbage: `gc.collect` need not look at it again."""
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFTOVERS] = Leftovers()
    config.pluginmanager.register(config.stash[LEFTOVERS])
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Run(*new_folder()))
