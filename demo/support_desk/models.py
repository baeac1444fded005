"""The two scripted models of the demo: the large one that answered before, and the judge.

Both are OpenAI-compatible endpoints (`flywheel.cli.demo.judge.running`) that know the right answer to each message.
Neither is a real model: the large one is wrong in a stated share of its replies, the judge in a stated share of its
findings, always in the same ones for a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from demo.support_desk.fields import FIELDS, right_fields
from demo.support_desk.messages import LETTERS, QUEUES, Message, Ticket
from demo.two_turns import TEACHER, text_of
from flywheel.cli.demo.judge import completion, criteria_of, token_of
from flywheel.judge.prompt import parse_sections

JUDGE: Final = "desk-judge"
WRONG_REPLIES: Final = 0.15
WRONG_VERDICTS: Final = 0.05


class Models:
    """What both models know: the tickets of the messages, by their text."""

    def __init__(self, messages: Iterable[Message], seed: int) -> None:
        self._tickets = {message.text: message.ticket for message in messages}
        self._seed = seed

    def teach(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The large model's completion. Raises KeyError for a message that it does not know."""
        text = next(text_of(message) for message in reversed(request["messages"]) if message["role"] == "user")
        return completion(TEACHER, self.taught(text), len(json.dumps(request["messages"])))

    def taught(self, question: str) -> str:
        """The large model's reply. Raises KeyError for a message that it does not know."""
        ticket, chosen = self._tickets[question], self._random("reply", question)
        given = _spoilt(ticket, chosen) if chosen.random() < WRONG_REPLIES else ticket
        return given.as_json()

    def judge(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The judge's completion: a choice for each criterion that is asked for, which has the id of a field."""
        said = [parse_sections(message["content"]) for message in request["messages"] if message["role"] == "user"]
        sections = next(each for each in said if "QUESTION" in each)
        question, answer = sections["QUESTION"], sections["ANSWER"]
        found = self.findings(question, answer)
        criteria = {}
        for name, choices in criteria_of(request).items():
            good = found[name]
            reason = f"The field {name} is {'right' if good else 'missing or wrong'}."
            criteria[name] = {"reason": reason, "choice": choices[-1] if good else choices[0]}
        content = json.dumps({"criteria": criteria, "check": token_of(request)})
        return completion(JUDGE, content, len(json.dumps(request["messages"])))

    def findings(self, question: str, answer: str) -> dict[str, bool]:
        """What the judge finds: field → whether it calls it right, which is sometimes wrong."""
        return {
            name: right != (self._random("verdict", name, question, answer).random() < WRONG_VERDICTS)
            for name, right in right_fields(answer, self._tickets[question]).items()
        }

    def _random(self, *of: str) -> random.Random:
        return random.Random("\0".join((str(self._seed), *of)))


def _spoilt(ticket: Ticket, chosen: random.Random) -> Ticket:
    """The ticket with one field that is wrong."""
    match chosen.choice(FIELDS):
        case "queue":
            return replace(ticket, queue=chosen.choice([queue for queue in QUEUES if queue != ticket.queue]))
        case "order":
            return replace(
                ticket, order=f"{chosen.choice(LETTERS)}{chosen.choice(LETTERS)}-{chosen.randint(0, 9999):05}"
            )
        case "customer":
            return replace(ticket, customer="the customer")
        case "date":
            return replace(ticket, date=f"{ticket.date[:-2]}{chosen.choice(('29', '30', '31'))}")
        case _:
            return replace(ticket, urgent=not ticket.urgent)
