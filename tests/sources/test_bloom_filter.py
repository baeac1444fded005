"""The trace ids of a first pass: none that was added counts as new, and few new ones count as added."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flywheel.sources.studio_connector import BloomFilter


@given(st.lists(st.text()))
def test_a_name_that_was_added_is_never_new(names: list[str]) -> None:
    seen = BloomFilter()
    for name in names:
        seen.add(name)
    assert all(seen.add(name) for name in names)


def test_few_new_names_are_taken_for_added() -> None:
    seen = BloomFilter()
    mistaken = sum(seen.add(f"trace-{number}") for number in range(200_000))
    assert mistaken < 2_000
