"""Functions called in child processes: what exceeds a limit, or fails, is an error in words."""

from __future__ import annotations

import pytest

from flywheel.system.limited_call import CostlyCallError, FunctionError, Limits, call_in_child
from tests.cases import for_each
from tests.factories.costly import compute, fail, take

ANY_TIME = Limits(cpu_seconds=0, memory=256 << 20)


@pytest.mark.slow
def test_a_call_has_its_own_limit_of_memory() -> None:
    assert call_in_child(take, 64, ANY_TIME) == 64 << 20
    with pytest.raises(CostlyCallError, match="ended its process"):
        call_in_child(take, 512, ANY_TIME)
    assert call_in_child(take, 512, Limits(cpu_seconds=0, memory=0)) == 512 << 20


@pytest.mark.slow
def test_a_call_has_its_own_limit_of_processor_time() -> None:
    with pytest.raises(CostlyCallError, match=r"takes more than 0\.1 s of processor time or 2,048 MB of memory"):
        call_in_child(compute, None, Limits(cpu_seconds=0.1))


@pytest.mark.slow
@for_each(
    "how, why",
    [
        ("exit", "SystemExit: exit"),
        ("divide", "ZeroDivisionError: division by zero"),
        ("set", "TypeError: Object of type set"),
        ("own", "^the text alone$"),
        ("end", r"^ended its process \(exit code 3\)$"),
    ],
)
def test_what_a_function_raises_is_an_error_in_words(how: str, why: str) -> None:
    with pytest.raises(FunctionError, match=why):
        call_in_child(fail, how, ANY_TIME)
