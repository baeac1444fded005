"""Python child processes that answer requests, and what runs in them: one protocol for both ends.

A request and its answer are bytes over a socket of their own, so nothing that is printed is taken for an answer. The
time limit of a request covers its whole answer. A child is the leader of a process group, which ends with it. It ends
when its parent does, since its socket then closes.

Only the standard library, in the syntax of Python 3.10: a child may run in the user's interpreter.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, NoReturn, TypeVar

from flywheel.system.heartbeat import beat

SECRET_BYTES: Final = 16
LENGTH_BYTES: Final = 8
SEND_BYTES: Final = 4 * 1024 * 1024
"""What the system is asked to hold of messages that are not received yet. It may hold less."""
SLICE_SECONDS: Final = 0.1
"""How often `watch` is called during a wait."""
IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a service manager sends to all processes: the parent decides when a child ends."""

Watch = Callable[[], None]
"""Called again and again during a request; what it raises ends the request."""


class ChildEndedError(Exception):
    """A child ended, or wrote something else into its connection; the text says how."""


class Channel:
    """Messages over a socket. Each begins with a secret of the connection and its length: what a program writes into
    all open file descriptors is no message."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._socket = connection
        self._secret = secret
        # The usual size is a fraction of a long message, whose sender would wait for the other end with every part.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)

    @classmethod
    def to_parent(cls) -> Channel:
        """The child's end. What the child prints goes to its standard error from now on."""
        connection = socket.socket(fileno=int(sys.argv.pop()))
        connection.set_inheritable(False)
        sys.stdout = sys.stderr
        return cls(connection, connection.recv(SECRET_BYTES, socket.MSG_WAITALL))

    def send(self, message: bytes, deadline: float | None = None, watch: Watch | None = None) -> None:
        """Raises ConnectionError when the other end is closed, and TimeoutError."""
        left = memoryview(self._secret + len(message).to_bytes(LENGTH_BYTES, "big") + message)
        while left:
            self._wait(select.POLLOUT, deadline, watch)
            with contextlib.suppress(BlockingIOError):
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]

    def receive(self, deadline: float | None = None, watch: Watch | None = None) -> bytes:
        """Raises EOFError when the other end is closed or sent something else, and TimeoutError."""
        head = self._read(SECRET_BYTES + LENGTH_BYTES, deadline, watch)
        if not head.startswith(self._secret):
            raise EOFError("something else was written into its connection")
        return self._read(int.from_bytes(head[SECRET_BYTES:], "big"), deadline, watch)

    def _read(self, size: int, deadline: float | None, watch: Watch | None) -> bytes:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            self._wait(select.POLLIN, deadline, watch)
            with contextlib.suppress(BlockingIOError):
                try:
                    count = self._socket.recv_into(left, flags=socket.MSG_DONTWAIT)
                except ConnectionError:
                    count = 0
                if not count:
                    raise EOFError
                left = left[count:]
        return bytes(data)

    def _wait(self, event: int, deadline: float | None, watch: Watch | None) -> None:
        # Not select, which cannot wait for file descriptors above 1,023.
        waiting = select.poll()
        waiting.register(self._socket, event)
        while True:
            if watch is not None:
                watch()
            seconds = None if deadline is None else deadline - time.monotonic()
            if seconds is not None and seconds <= 0:
                raise TimeoutError
            if watch is not None:
                seconds = SLICE_SECONDS if seconds is None else min(seconds, SLICE_SECONDS)
            if waiting.poll(None if seconds is None else seconds * 1000):
                return

    def close(self) -> None:
        self._socket.close()


def python_command(module: str) -> list[str]:
    """Runs `main` of one of our modules, by our own path and with -P: not what is in the current directory."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"
    return [sys.executable, "-P", "-c", code]


class ChildProcess:
    """The parent's end. One request at a time, unless `send` and `receive` are called by themselves."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: str | None = None) -> None:
        """`command` gets the number of a file descriptor as its last argument. Raises OSError if it cannot start."""
        with self._connected() as theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env=environment,
                # Of its own: Ctrl-C is meant for the parent, and what the child starts ends with the group.
                process_group=0,
            )

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """The end of a new connection for the child that is started meanwhile."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                yield theirs
            except BaseException:
                ours.close()
                raise
        secret = os.urandom(SECRET_BYTES)
        with contextlib.suppress(ConnectionError):
            ours.send(secret)
        self._channel = Channel(ours, secret)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called, or a request has failed."""
        return self._process.returncode is not None

    def ask(self, request: bytes, seconds: float, watch: Watch | None = None) -> bytes:
        """The answer. An error ends the child: TimeoutError, ChildEndedError, or what `watch` raises."""
        beat(seconds)
        deadline = time.monotonic() + seconds
        try:
            self.send(request, deadline, watch)
            return self.receive(deadline, watch)
        except EOFError as error:
            code = self.end()
            raise ChildEndedError(str(error) or how_ended(code)) from None
        except BaseException:
            self.end()
            raise

    def send(self, request: bytes, deadline: float | None = None, watch: Watch | None = None) -> None:
        """Send a request. If the child has ended, `receive` says so."""
        with contextlib.suppress(ConnectionError):
            self._channel.send(request, deadline, watch)

    def receive(self, deadline: float | None = None, watch: Watch | None = None) -> bytes:
        """The answer to the first request without one. Raises TimeoutError, and EOFError if the child has ended."""
        return self._channel.receive(deadline, watch)

    def kill(self) -> None:
        """Kill the child and what it has started, from any thread. Whoever waits for an answer finds its end."""
        # Until it was waited for, the number belongs to this group.
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the child and what it has started. Returns its exit code."""
        self.kill()
        code = self._process.wait()
        self._channel.close()
        return code


def how_ended(code: int) -> str:
    """Of an exit code; that of a signal is negative."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit code {code}"


Child = TypeVar("Child", bound=ChildProcess)


class ChildPool(Generic[Child]):
    """Children of which each answers one request at a time. Thread-safe; closed at exit as well."""

    def __init__(self, most: int) -> None:
        self._free = threading.Semaphore(most)
        self._idle: list[Child] = []
        self.close = weakref.finalize(self, _end_all, self._idle)

    @contextlib.contextmanager
    def child(
        self, start: Callable[[], Child], is_usable: Callable[[Child], bool] = lambda _: True
    ) -> Iterator[Child]:
        """An idle child, or a new one from `start`. Afterwards it is idle again, unless it was ended. Idle ones that
        are not usable are ended."""
        with self._free:
            try:
                while not is_usable(child := self._idle.pop()):
                    child.end()
            except IndexError:
                child = start()
            try:
                yield child
            finally:
                if not child.has_ended:
                    self._idle.append(child)
                if not self.close.alive:  # closed in the meantime, which could not end this one
                    _end_all(self._idle)


def _end_all(children: list[Child]) -> None:
    while children:
        children.pop().end()


def serve(answer: Callable[[bytes], bytes]) -> NoReturn:
    """In the child: answer requests until the parent closes the connection or ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    channel = Channel.to_parent()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(channel.receive())
        os.killpg(0, signal.SIGKILL)  # also during a request, with all that it has started

    threading.Thread(target=read, daemon=True).start()
    own = os.getpid()
    while True:
        message = answer(requests.get())
        if os.getpid() != own:
            os._exit(0)  # a process that the function has forked returned from it, too
        channel.send(message)
