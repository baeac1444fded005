"""The version that answered is read back from the response id, whatever its name holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.request_id import BASE_VERSION, mark_of, new_request_id

INSTANCE = "0123456789abcdef"


@given(st.text(st.characters(codec="ascii", exclude_characters="\x00"), min_size=1, max_size=60))
def test_any_version_is_read_back(version: str) -> None:
    made = new_request_id(INSTANCE, version)

    assert made.isascii() and made.isprintable() and " " not in made
    for response_id in (made, f"chatcmpl-{made}", f"cmpl-{made}-0"):
        mark = mark_of(response_id)
        assert mark is not None and (mark.instance, mark.version) == (INSTANCE, version)


def test_two_requests_never_have_one_id() -> None:
    assert len({new_request_id(INSTANCE, BASE_VERSION) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("other", ["", "chatcmpl-8a7b", "fw-", "fw-zz-r1-00", "chatcmpl-fw-" + INSTANCE])
def test_ids_of_others_have_no_mark(other: str) -> None:
    assert mark_of(other) is None
