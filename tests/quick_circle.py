"""A pytest plugin: a test of the circle `quick` fails if it starts Python or a browser, or imports vLLM, Ray, torch.

Processes that `tests/warm.py` forks are allowed, and so are those that start in a tenth of a second: small programs
of the system such as `git`, and the bare children that `flywheel/system/child_process.py` starts (`python -P -c`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.circles import circle_of

HEAVY: Final = {"ray", "torch", "transformers", "trl", "vllm"}
OF_THE_SYSTEM: Final = ("/bin", "/sbin", "/usr")
NOT_SMALL: Final = ("python", "chrom")


@dataclass
class Running:
    """The test that runs: whether it is of this circle, and what it has started or imported so far."""

    is_quick: bool = False
    seen: list[str] = field(default_factory=list)


_running = Running()


def is_small(program: str) -> bool:
    """Whether it is a program of the system that is neither Python nor a browser."""
    path = Path(program)
    return not path.name.startswith(NOT_SMALL) and (not path.is_absolute() or program.startswith(OF_THE_SYSTEM))


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        executable, command = arguments[:2]
        words = [os.fsdecode(each) for each in ([command] if isinstance(command, (str, bytes)) else command)]
        first = os.fsdecode(executable or words[0])
        if not is_small(first) and words[1:3] not in (["-P", "-c"], ["-m", "tests.warm"]):
            _running.seen.append(f"starts {first}")
    elif event == "import" and arguments[0] in HEAVY:
        _running.seen.append(f"imports {arguments[0]}")
        if _running.is_quick:
            # So that the next test that needs it is found as well.
            raise ImportError(f"a test of the circle `quick` imports {arguments[0]}: mark it `slow`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """What fixtures did for this test counts as well."""
    result = yield
    if _running.seen and _running.is_quick:
        pytest.fail(f"This test {', '.join(dict.fromkeys(_running.seen))}: mark it `slow`.", pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running.seen.clear()
    _running.is_quick = circle_of({marker.name for marker in item.iter_markers()}) == "quick"


def pytest_configure() -> None:
    sys.addaudithook(_audit)
