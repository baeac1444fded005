"""The exact checks of a support desk's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from statistics import fmean
from typing import Final

from demo.checks import Result, share
from demo.support_desk.messages import Message, Ticket

FIELDS: Final = tuple(field.name for field in fields(Ticket))


def right_fields(answer: str, ticket: Ticket) -> dict[str, bool]:
    """Field → whether the answer has its value. No field is right of an answer that is not one JSON object."""
    try:
        read = json.loads(answer)
    except ValueError:
        read = None
    given = read if isinstance(read, dict) else {}
    # The type counts, too: 1 is not true.
    return {
        name: type(given.get(name)) is type(value) and given[name] == value for name, value in asdict(ticket).items()
    }


def result(messages: Sequence[Message], answers: Sequence[str]) -> Result:
    """Check one answer to each message: `exact` is the share of those with all fields right, `fields` that of right
    fields."""
    checked = [right_fields(answer, message.ticket) for message, answer in zip(messages, answers, strict=True)]
    phrases = [message.phrase for message in messages]
    return Result(
        shares={
            "exact": share(
                [(phrase, float(all(each.values()))) for phrase, each in zip(phrases, checked, strict=True)]
            ),
            "fields": share([(phrase, fmean(each.values())) for phrase, each in zip(phrases, checked, strict=True)]),
        },
        answers=len(answers),
        by_field={name: fmean(each[name] for each in checked) for name in FIELDS},
    )
