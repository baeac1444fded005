"""Running the command line in a terminal of its own, as wide as asked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import warm

SECONDS = 120


@dataclass(frozen=True)
class Seen:
    """What stood on the terminal in the course of time, without colours and movements; what went elsewhere;
    and the screen with its colours."""

    code: int
    screen: str
    piped: str = ""
    coloured: str = ""

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.screen) if line.strip()]


def in_terminal(
    folder: Path,
    arguments: Sequence[str | Path],
    *,
    columns: int,
    home: Path,
    piped: bool = False,
    variables: Mapping[str, str] | None = None,
    typed: bytes = b"",
    interrupted_at: bytes = b"",
    then: Callable[[], object] | None = None,
    program: Sequence[str] = ("-m", "flywheel"),
) -> Seen:
    """Run `flywheel ARGUMENTS…` in `folder`; `piped`: only what goes to stderr is seen on the terminal. `typed` waits
    for whoever reads from the terminal. When the command has shown `interrupted_at`, it is interrupted, or `then` is
    called. `program` is what Python runs."""
    master, slave = pty.openpty()
    os.write(master, typed)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in _OF_TERMINALS}
    environment: Mapping[str, str] = {**kept, "TERM": "xterm", "HOME": str(home), **(variables or {})}
    output = folder / "piped"
    with output.open("wb") as file:
        process = warm.Popen(
            [sys.executable, *program, *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=file if piped else slave,
            stderr=slave,
            start_new_session=True,
        )
    os.close(slave)
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    shown = bytearray()
    with contextlib.suppress(OSError):
        # Reading fails when the last one who could write is gone.
        while some := os.read(master, 65536):
            shown += some
            if interrupted_at and interrupted_at in shown:
                interrupted_at = b""
                then() if then else process.send_signal(signal.SIGINT)
    watchdog.cancel()
    os.close(master)
    code = process.wait(SECONDS)
    coloured = shown.decode()
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", coloured)
    assert "Traceback" not in screen, screen
    return Seen(code, screen, output.read_text(), coloured)


_OF_TERMINALS = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "FLYWHEEL_CONFIG", "FLYWHEEL_HOME", "FLYWHEEL_LOG"}


EVIL = "\x1b]0;title\x07\x1b[2J\x9b2J\u202eevil\r"
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
