"""Fixtures of the command line's tests: what is compared is what the command does."""

from tests.cli.conftest import bench, flywheel, judge

__all__ = ["bench", "flywheel", "judge"]
