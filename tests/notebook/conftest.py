"""Fixtures of the command line's tests: what is compared is what the command does."""

from tests.cli.conftest import bench, flywheel

__all__ = ["bench", "flywheel"]
