"""The messages of the support desk: what is measured was never trained on."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from demo.support_desk.messages import DESK, DEVELOPMENT, HELD_OUT, KINDS, TEACHER, Kind


def parts(kind: Kind) -> dict[str, set[str]]:
    return {
        "phrases": {phrase for several in kind.phrases.values() for phrase in several},
        "names": set(kind.names),
        "forms": set(kind.forms),
        "orders": set(kind.orders),
        "dates": set(kind.dates),
        "urgencies": set(kind.urgencies),
    }


@pytest.mark.parametrize(("one", "other"), list(combinations(range(len(KINDS)), 2)))
def test_kinds_share_nothing(one: int, other: int) -> None:
    first, second = parts(KINDS[one]), parts(KINDS[other])
    for name, values in first.items():
        assert not values & second[name], name


def test_held_out_phrases_and_names_occur_in_no_training_message() -> None:
    trained = [message.text for kind in (TEACHER, DESK) for message in kind.draw(400, 3)]
    held_out = parts(HELD_OUT)
    for text in trained:
        assert not [phrase for phrase in held_out["phrases"] if phrase in text]
        assert not [name for name in held_out["names"] if re.search(rf"\b{name}\b", text)]
        assert not [said for said in held_out["urgencies"] if said in text]


def test_held_out_messages_have_48_phrases_in_each_form() -> None:
    drawn = HELD_OUT.draw(96, 0)
    assert len({message.text for message in drawn}) == 96
    assert len({message.phrase for message in drawn}) == 48
    assert all(sum(message.phrase == phrase for message in drawn) == 2 for phrase in parts(HELD_OUT)["phrases"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_says_what_its_ticket_holds(kind: Kind) -> None:
    for message in kind.draw(60, 5):
        ticket, text = message.ticket, message.text
        assert message.phrase in kind.phrases[ticket.queue]
        assert ticket.customer in text and message.phrase in text
        letters, number = ticket.order.split("-")
        assert letters in text.upper() and number in text
        assert str(int(ticket.date[-2:])) in text and ticket.date[:4] in text
        assert any(said in text for said in kind.urgencies) == ticket.urgent


def test_a_seed_gives_the_same_messages() -> None:
    assert DEVELOPMENT.draw(20, 1) == DEVELOPMENT.draw(20, 1) != DEVELOPMENT.draw(20, 2)
