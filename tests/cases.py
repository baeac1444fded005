"""Many cases in one test: a corpus is gone through in a loop, and every case that fails is reported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def for_each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test with every value, like `pytest.mark.parametrize`, but as one test with its fixtures made once.

    A test that needs a fresh fixture for each value takes `parametrize`.
    """
    split = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    cases = [value.values if hasattr(value, "marks") else value if len(split) > 1 else (value,) for value in values]
    if not cases:
        raise ValueError(f"there is no case of {names}")

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            for case in cases:
                arguments = dict(zip(split, case, strict=True))
                try:
                    test(**arguments, **fixtures)
                except (Exception, pytest.fail.Exception) as failure:
                    failure.add_note(f"with {arguments!r}"[:500])
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(cases)} cases fail", failures)

        signature = inspect.signature(test)
        kept = [found for name, found in signature.parameters.items() if name not in split]
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return loop

    return decorate
