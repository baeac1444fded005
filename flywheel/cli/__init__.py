"""The command line: one file per group of commands, which is imported when one of them is run."""

from flywheel.cli.entry_point import main

__all__ = ["main"]
