"""Runs the tests of `tests/repeated.tsv` as often as it says, beside four busy processes:

    python -m scripts.repeat_tests [NODE …]

All in one process of pytest that runs nothing else. Prints how often each test passed. NODE is a test of the list, or
the beginning of one. A test is run 100 times; 10 times if it takes more than five seconds, or all its cases together
do by far; 3 times if a server, a round or daemons start.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

LIST: Final = Path(__file__).parent.parent / "tests" / "repeated.tsv"
BUSY: Final = 4


def listed() -> dict[str, int]:
    """How often each test is run, by its node id. A parametrised test stands for all its cases."""
    rows = (line.split("\t") for line in LIST.read_text().splitlines())
    return {node: int(times) for node, times in rows}


class Repetition:
    """A plugin of pytest that runs each test several times, and counts."""

    def __init__(self, times: dict[str, int]) -> None:
        self._times = times
        self.runs: Counter[str] = Counter()
        self.failed: set[tuple[str, int]] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [_again(item) for item in items for _ in range(self._times[item.nodeid.partition("[")[0]])]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that was run again, or skipped, has not passed."""
        self.runs[report.nodeid] += report.when == "setup"
        if report.outcome != "passed":
            self.failed.add((report.nodeid, self.runs[report.nodeid]))


def _again(item: pytest.Item) -> pytest.Item:
    """The same test as another item: two runs of one item would share its fixtures."""
    assert isinstance(item, pytest.Function)
    another = copy.copy(item)
    another._initrequest()
    return another


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that use the processor all the time, of other sessions: within one, Linux would leave next to
    nothing to Ray's processes, which ask for less. They also end when this process is killed."""
    command = [sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    wanted = sys.argv[1:] or [""]
    times = {node: number for node, number in listed().items() if node.startswith(tuple(wanted))}
    if not times:
        sys.exit(f"{LIST.name} has none of {', '.join(wanted)}")
    repetition = Repetition(times)
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "-o", "tmp_path_retention_policy=failed"]
    with busy(BUSY):
        code = pytest.main([*options, *times], [repetition])
    failures = Counter(node for node, _ in repetition.failed)
    for node, runs in repetition.runs.items():
        print(f"{runs - failures[node]} of {runs} passed\t{node}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
