"""Texts that would command a terminal are shown; everything else stays as it is."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.system import log
from flywheel.system.terminal import duration, escape_terminal, percent, quantity

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))


@given(ANY_TEXT)
def test_no_text_commands_a_terminal(text: str) -> None:
    for safe in (escape_terminal(text), escape_terminal(text, one_line=True)):
        safe.encode()
        assert not [sign for sign in safe if sign < " " and sign not in "\n\t"]
        assert not set(safe) & {*map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\u2028"}
    assert "\n" not in escape_terminal(text, one_line=True)


@pytest.mark.parametrize("text", ["two\nlines\tand a tab", "什么　是", "👩‍👩‍👧 नमस्ते می‌خواهم", "a\u00a0b", "", "�"])
def test_what_people_write_stays(text: str) -> None:
    assert escape_terminal(text) == text


def test_a_command_is_shown() -> None:
    assert escape_terminal("\x1b]0;x\x07\x7f\x9b2J\ud83d") == "␛]0;x␇␡�2J�"


def test_every_text_of_a_report_is_looked_at() -> None:
    told = {"a\x1b": ["\x1b", ("\x1b", 1, None)], "b": {"c": "\x1b\n"}}
    assert escape_terminal(told) == {"a␛": ["␛", ["␛", 1, None]], "b": {"c": "␛\n"}}
    assert escape_terminal(told, one_line=True)["b"] == {"c": "␛"}


def test_what_is_logged_is_disarmed(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers
    try:
        log.setup()
        logging.getLogger("flywheel.test").warning("agent %s", "\x1b[2J")
    finally:
        logging.getLogger().handlers = before
    assert "agent ␛[2J" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 replies"), (1, "1 reply"), (2, "2 replies"), (1_200, "1,200 replies")]
)
def test_a_noun_goes_by_its_number(number: int, words: str) -> None:
    assert quantity(number, "reply", "replies") == words


def test_most_nouns_take_an_s() -> None:
    assert [quantity(number, "call") for number in (1, 3)] == ["1 call", "3 calls"]


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_600, "1 h 0 min"), (7_384, "2 h 3 min")]
)
def test_durations_read_as_people_say_them(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.939207, "94 %"),
        (0, "0 %"),
        (1, "100 %"),
        (0.5, "50 %"),
        (0.9976, "99.8 %"),
        (0.0004, "0.04 %"),
        (0.99, "99 %"),
    ],
)
def test_a_share_is_in_whole_percent_unless_that_would_be_all_or_nothing(share: float, text: str) -> None:
    assert percent(share) == text
