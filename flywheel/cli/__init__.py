"""The command line: a file per group of commands. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from flywheel.cli.app import main

__all__ = ["main"]
