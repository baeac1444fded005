"""What a first pass has met: nothing is taken for new twice, and little is asked for in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flywheel.sources.checkpoint_cache import Met


@given(st.lists(st.text()))
def test_what_was_met_is_never_new(names: list[str]) -> None:
    met = Met()
    for name in names:
        met.add(name)
    assert all(met.add(name) for name in names)


def test_few_are_mistaken() -> None:
    met = Met()
    mistaken = sum(met.add(f"trace-{number}") for number in range(200_000))
    assert mistaken < 2_000
