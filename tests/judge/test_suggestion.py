"""Drafts of rubrics as judges write them."""

from __future__ import annotations

from flywheel.judge.suggestion import parse_draft


def test_half_a_character_in_a_draft_can_be_written_to_a_file() -> None:
    draft = parse_draft('Here: {"description": "a \\ud83d b", "criteria": [{"id": "x", "value": "\\ud83d"}]}')
    assert draft == {"description": "a ? b", "criteria": [{"id": "x", "value": "?"}]}
