"""The processes that watch those of the user's agent, and end them with all that they have started.

    pool's process ── fork server ─┬─ watcher ── process of the agent ── what it starts
                                   └─ watcher ── …

A watcher adopts what is orphaned below it (it is a "child subreaper", Linux). It kills all of it when the process of
the agent ends, when the pool closes its connection, and when the fork server ends, as that does with the pool's
process. Watchers are no children of that process, because Ray kills the children of an actor that ends, but not
theirs. Nor are they orphans, which would stay as zombies where nobody reaps them. They share the fork server's
memory, and one look at what runs below it serves all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import psutil

from flywheel.system.child_process import IGNORED, python_command
from flywheel.system.process import adopt_orphans

KILL_SECONDS: Final = 5.0
"""For processes that were killed."""
LOOK_SECONDS: Final = 1.0
"""How often a fork server and a watcher look whether their parent is there. A process that was forked from the pool's
may keep connections open after its death."""


class ForkServer:
    """The pool's end. The fork server starts when it is used first, and anew if it was ended. Thread-safe."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: str | None) -> None:
        """For processes of one command, which gets two more arguments: the pid of its watcher, and the number of a
        file descriptor."""
        self._command = [*python_command(__name__), json.dumps([folder, *command])]
        self._environment = environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._below: Mapping[int, list[psutil.Process]] = {}
        self._looked = 0.0

    def start(self, channel: socket.socket) -> socket.socket:
        """Start a process that has this end of a socket. Returns the connection to its watcher (see `watch`). Raises
        OSError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._connection, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen(
                        self._command, stdin=theirs.fileno(), stdout=2, env=self._environment, process_group=0
                    )
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._connection, [b"\0"], [channel.fileno(), theirs.fileno()])
        return ours

    def below(self, watcher: int, *, age: float = 0.0) -> Sequence[psutil.Process]:
        """What runs below a watcher, as it was at most so many seconds ago; parents come before their children."""
        with self._lock:
            if watcher not in self._below or time.monotonic() - self._looked >= age:
                self._below, self._looked = self._look(), time.monotonic()
            return self._below.get(watcher, ())

    def _look(self) -> Mapping[int, list[psutil.Process]]:
        found: dict[int, list[psutil.Process]] = defaultdict(list)
        watchers: dict[int, int] = {}
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if (parent := process.ppid()) == self._process.pid:
                        watchers[process.pid] = process.pid
                    elif parent in watchers:
                        watchers[process.pid] = watchers[parent]
                        found[watchers[parent]].append(process)
        return found

    def close(self) -> None:
        """End it, and with it all watchers."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()


def resident_bytes(processes: Sequence[psutil.Process], limit: int) -> int:
    """Resident memory of processes. If it would be above the limit otherwise, pages that they share count once."""
    resident = sum(_bytes_of(process) for process in processes)
    return resident if resident <= limit else sum(_bytes_of(process, share=True) for process in processes)


def _bytes_of(process: psutil.Process, *, share: bool = False) -> int:
    """Its resident bytes, or its share: each page is divided by the number of processes that have it, which is slow
    (and only Linux's)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if share:
            with contextlib.suppress(psutil.AccessDenied, AttributeError):
                return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    return 0


def name_of(process: psutil.Process) -> str:
    """Its command line, shortened."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()[:80] or "a process"
    return "a process"


def end_all(find: Callable[[], Sequence[psutil.Process]]) -> bool:
    """Kill what is found, again and again, until nothing is, or for KILL_SECONDS. Returns whether nothing is."""
    deadline = time.monotonic() + KILL_SECONDS
    while (found := find()) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
    return not found


def main() -> None:
    """The fork server, until the pool's process ends."""
    connection, pool, server = socket.socket(fileno=0), os.getppid(), os.getpid()
    folder, *command = json.loads(sys.argv[-1])
    for number in IGNORED:
        signal.signal(number, lambda *_: None)  # what is ignored would stay so in the process of the agent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers leave no zombies
    while os.getppid() == pool:
        if select.select([connection], [], [], LOOK_SECONDS)[0]:
            message, descriptors, *_ = socket.recv_fds(connection, 1, 2)
            if not message:
                break
            try:
                forked = os.fork()
            except OSError as error:  # such as a limit of processes, which costs no agent that runs
                _say(descriptors[1], str(error))
                forked = -1
            if not forked:
                try:
                    watch(command, folder, server, *descriptors)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            for each in descriptors:
                os.close(each)
    os._exit(0)


def _say(descriptor: int, value: Any) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(value).encode() + b"\n")


def watch(command: Sequence[str], folder: str | None, server: int, channel: int, descriptor: int) -> NoReturn:
    """The watcher. It writes lines of JSON into its connection: its pid, or why the process does not start, and when
    that has ended and nothing is left below it, the exit code, which is negative for a signal."""

    def wait_for_end() -> None:
        while os.getppid() == server and not select.select([connection], [], [], LOOK_SECONDS)[0]:
            pass
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    def left() -> list[psutil.Process]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return [*own.children(recursive=True)]

    connection, own = socket.socket(fileno=descriptor), psutil.Process()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    try:
        whole = [*command, str(os.getpid()), str(channel)]
        # A group of its own: the agent may signal all of its group.
        pid = subprocess.Popen(whole, stdin=subprocess.DEVNULL, cwd=folder, pass_fds=[channel], process_group=0).pid
        process = psutil.Process(pid)
        threading.Thread(target=wait_for_end).start()
    except (OSError, RuntimeError) as error:  # a thread that cannot start is a RuntimeError
        end_all(left)
        _say(descriptor, str(error))
        os._exit(0)
    os.close(channel)
    _say(descriptor, own.pid)
    while (ended := os.waitpid(-1, 0))[0] != pid:
        pass
    end_all(left)
    _say(descriptor, os.waitstatus_to_exitcode(ended[1]))
    os._exit(0)
