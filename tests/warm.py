"""Python processes that start at once: they are forked from one that has imported Flywheel.

`Popen` and `run` are those of `subprocess`. A command `[sys.executable, "-m", MODULE, …]`, or `-c` and code, starts
without the second that imports take. Tests of the start itself, or of what the interpreter reads from its
environment, use `subprocess`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
COLD: Final = ("flywheel.training", "flywheel.__main__")
PR_SET_CHILD_SUBREAPER: Final = 36
MOST_BYTES: Final = 1 << 17


class Popen(subprocess.Popen[Any]):
    """Starts a module of Python by a fork. The process is a child of this one, as any other."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        (_, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes, _, gid, gids, uid, umask, new_session, group) = (
            more
        )
        special = preexec_fn or pass_fds or shell or gid or gids or uid or umask != -1 or group != -1
        command = [os.fspath(each) for each in args] if not isinstance(args, str) else []
        is_python = command[:1] == [sys.executable] and command[1:2] in (["-m"], ["-c"])
        if special or not is_python or not _takes(env):
            super()._execute_child(args, *more)
            return
        request = {
            "option": command[1],
            "arguments": command[2:],
            "cwd": os.fspath(cwd) if cwd is not None else str(Path.cwd()),
            "env": {
                os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()
            },
            "umask": _umask(),
            "new_session": new_session,
        }
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        standard = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _server().start(request, standard)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(command: Sequence[Any], *, input: Any = None,  # noqa: A002
 timeout: float | None = None, check: bool = False,
        capture_output: bool = False, **more: Any) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """As `subprocess.run`."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _takes(env: Mapping[str, str] | None) -> bool:
    """Whether the interpreter would read nothing else from this environment than the server has read."""

    def read(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name.startswith(("PYTHON", "LC_", "LANG"))}

    return env is None or read(env) == read(os.environ)


def _umask() -> int:
    """This process's, without changing it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Umask:")[2].split()[0], 8)


class _Server:
    """The process that is forked, and the end of its socket that is ours."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-m", "tests.warm"], cwd=ROOT, stdin=theirs)

    def start(self, request: dict[str, Any], standard: Sequence[int]) -> int:
        """Fork and give the process id of the child, which is adopted: its own parent ends at once."""
        with self._lock, _adopting():
            socket.send_fds(self._socket, [json.dumps(request).encode()], standard)
            answer = self._socket.recv(MOST_BYTES)
        return int(answer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


def servers() -> set[int]:
    """The process that is forked, if there is one."""
    return {each.pid for each in _servers}


def end_server() -> None:
    """End the process that is forked, if there is one."""
    while _servers:
        _servers.pop().end()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of what is orphaned below this process meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _preload() -> None:
    import flywheel

    for module in pkgutil.walk_packages(flywheel.__path__, "flywheel."):
        if not module.name.startswith(COLD) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # Neither a collection nor the end of a child copies the pages of all these modules.
    gc.freeze()


def _forked(requests: socket.socket) -> dict[str, Any] | None:
    """Serve until the other end is closed (None), or, in a child, until it is one (its request)."""
    while True:
        data, standard, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not data:
            return None
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            for number, given in enumerate(standard):
                os.dup2(given, number)
            request: dict[str, Any] = json.loads(data)
            return request
        os.waitpid(between, 0)
        requests.send(os.read(told, 100))
        for number in (told, tell, *standard):
            os.close(number)


def _become(request: dict[str, Any]) -> None:
    """Run the module or the code as `python` would."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.path[0] = request["cwd"]
    sys.argv = request["arguments"]
    if request["option"] == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        code, sys.argv[0] = sys.argv[0], "-c"
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, main.__dict__)


def main() -> None:
    requests = socket.socket(fileno=os.dup(0))
    _preload()
    if (request := _forked(requests)) is not None:
        requests.close()
        _become(request)


if __name__ == "__main__":
    main()
