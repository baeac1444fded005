"""The exact checks of answers, and their intervals."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from demo.checks import share
from demo.support_desk.fields import FIELDS, result, right_fields
from demo.support_desk.messages import HELD_OUT, Ticket

TICKET = Ticket("billing", "AB-12345", "Lara", "2026-01-31", urgent=True)


def test_the_right_answer_has_all_fields() -> None:
    assert right_fields(TICKET.as_json(), TICKET) == dict.fromkeys(FIELDS, True)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("no JSON", 0),
        ("[1]", 0),
        ("null", 0),
        (TICKET.as_json() + " Kind regards", 0),
        (json.dumps({**asdict(TICKET), "urgent": 1}), 4),
        (json.dumps({**asdict(TICKET), "order": "ab-12345"}), 4),
        (json.dumps({"queue": "billing"}), 1),
        (json.dumps({**asdict(TICKET), "more": 1}), 5),
    ],
)
def test_fields_count_one_by_one(answer: str, right: int) -> None:
    assert sum(right_fields(answer, TICKET).values()) == right


def test_the_interval_is_of_phrases_not_of_answers() -> None:
    few = share([("a", 0.0), ("b", 1.0), ("c", 0.0), ("d", 1.0)])
    repeated = share([("a", 0.0), ("b", 1.0), ("c", 0.0), ("d", 1.0)] * 10)
    assert (few.mean, few.lower, few.upper) == (repeated.mean, repeated.lower, repeated.upper)
    assert few.phrases == 4 and few.mean == 0.5
    # Student's t with 3 degrees of freedom: 3.182 standard errors, each 0.577 / 2.
    assert few.lower == 0.0 and few.upper == 1.0
    wide = share([(str(number), float(number % 2)) for number in range(40)])
    assert wide.upper - wide.mean == pytest.approx(2.0227 * 0.50637 / 40**0.5, rel=1e-3)


def test_a_result_counts_exact_answers_and_fields() -> None:
    messages = HELD_OUT.draw(96, 0)
    answers = [message.ticket.as_json() for message in messages]
    answers[0] = "nothing"
    found = result(messages, answers)
    assert found.answers == 96 and found.shares["exact"].phrases == 48
    assert found.shares["exact"].mean == pytest.approx(95 / 96)
    assert found.shares["fields"].mean == pytest.approx(95 / 96)
    assert found.by_field == pytest.approx(dict.fromkeys(FIELDS, 95 / 96))
