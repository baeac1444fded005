"""Time limits of child processes that run out at a moment of the test's choice, however slow the machine is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from flywheel.system import child_process

AFTER = 1e6
"""Seconds: more than any limit."""


def runs_out_when(monkeypatch: pytest.MonkeyPatch, happened: Callable[[], int]) -> None:
    """Let the limits of all calls that are under way run out each time when the number of what `happened` changes.

    A test in which only one of them is to run out makes its calls one after the other.
    """
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: AFTER * happened()))


def never_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_out_when(monkeypatch, lambda: 0)
