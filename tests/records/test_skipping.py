"""The warning about a source of which every reply is skipped."""

from __future__ import annotations

import pytest

from flywheel.records.skipping import MIN_REPLIES, REMEDIES, warning
from flywheel.records.states import SkipReason


@pytest.mark.parametrize("reason", SkipReason)
def test_each_reason_has_a_remedy_unless_another_source_has_the_replies(reason: SkipReason) -> None:
    said = warning({reason.value: MIN_REPLIES}, MIN_REPLIES)
    if reason in (SkipReason.RECORDED, SkipReason.IN_TASK_FILE):
        assert said == ""
    else:
        assert said == f"all {MIN_REPLIES} replies are skipped as `{reason}`. {REMEDIES[reason]}"
        assert REMEDIES[reason].endswith(".")


@pytest.mark.parametrize(
    ("skipped", "replies"),
    [
        ({}, 0),
        ({"no_query": MIN_REPLIES - 1}, MIN_REPLIES - 1),
        ({"no_query": MIN_REPLIES}, MIN_REPLIES + 1),
        ({"no_query": MIN_REPLIES, "error": 1}, MIN_REPLIES + 1),
    ],
)
def test_few_replies_other_outcomes_and_several_reasons_are_no_warning(skipped: dict[str, int], replies: int) -> None:
    assert warning(skipped, replies) == ""


def test_what_replies_lack_is_said_unless_it_may_quote_them() -> None:
    assert "(no question)" in warning({"no_query": 9}, 9, "no question")
    assert "secret" not in warning({"error": 9}, 9, "the tool failed on secret")
