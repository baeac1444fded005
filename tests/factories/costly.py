"""Functions that take time or memory, to be called in child processes."""

from __future__ import annotations

import os

from flywheel.system.limited_call import FunctionError


def take(megabytes: int) -> int:
    return len(bytearray(megabytes << 20))


def compute(_: None) -> None:
    while True:
        pass


def fail(how: str) -> object:
    if how == "exit":
        raise SystemExit(how)
    if how == "own":
        raise FunctionError("the text alone")
    if how == "end":
        os._exit(3)
    return 1 / 0 if how == "divide" else {1, 2}
