"""The customers' messages, and what each of them says.

Messages are of four kinds. No phrase, name or way of writing of one kind occurs in another: what a model learns from
the messages of `TEACHER` and `DESK` is measured on those of `HELD_OUT`, and settings are chosen on `DEVELOPMENT`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Final

SYSTEM_PROMPT: Final = "Extract as JSON: queue (billing, delivery, account, returns), order, customer, date, urgent."
MONTHS: Final = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
LETTERS: Final = "ABCDEFGHKMPRSTX"
YEAR: Final = 2026
URGENT_SHARE: Final = 0.4


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a message says. `date` is of the form 2026-01-31; a message is urgent if it says so."""

    queue: str
    order: str
    customer: str
    date: str
    urgent: bool

    def as_json(self) -> str:
        """The right answer."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Message:
    """A customer's message. `phrase` is the part of it that tells the queue."""

    text: str
    phrase: str
    ticket: Ticket

    @property
    def chat(self) -> list[dict[str, str]]:
        """What the model is asked."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Kind:
    """Of what the messages of a kind are made.

    Forms have the places `phrase`, `order`, `date`, `name` and `urgent`; orders `letters` and `number`, of which
    `small` are the letters in lower case; dates `year`, `month` (a number), `name` (of the month) and `day`.
    """

    phrases: Mapping[str, Sequence[str]]
    names: Sequence[str]
    forms: Sequence[str]
    orders: Sequence[str]
    dates: Sequence[str]
    urgencies: Sequence[str]

    def draw(self, count: int, seed: int) -> list[Message]:
        """Different messages, with all phrases and forms about equally often."""
        chosen = random.Random(seed)
        phrases = [(queue, phrase) for queue, several in self.phrases.items() for phrase in several]
        places = list(product(phrases, self.forms))
        drawn: dict[str, Message] = {}
        while len(drawn) < count:
            chosen.shuffle(places)
            for (queue, phrase), form in places:
                message = self._message(queue, phrase, form, chosen)
                drawn.setdefault(message.text, message)
        return list(drawn.values())[:count]

    def _message(self, queue: str, phrase: str, form: str, chosen: random.Random) -> Message:
        letters = "".join(chosen.choices(LETTERS, k=2))
        number, month, day = chosen.randint(10000, 99999), chosen.randint(1, 12), chosen.randint(1, 28)
        name, urgent = chosen.choice(self.names), chosen.random() < URGENT_SHARE
        order = chosen.choice(self.orders).format(letters=letters, small=letters.lower(), number=number)
        date = chosen.choice(self.dates).format(year=YEAR, month=month, name=MONTHS[month - 1], day=day)
        said = f" {chosen.choice(self.urgencies)}" if urgent else ""
        text = form.format(phrase=phrase, order=order, date=date, name=name, urgent=said)
        ticket = Ticket(queue, f"{letters}-{number}", name, f"{YEAR}-{month:02}-{day:02}", urgent)
        return Message(text, phrase, ticket)


TEACHER: Final = Kind(
    phrases={
        "billing": ("The invoice is too high", "My card was charged twice"),
        "delivery": ("The parcel is late", "The parcel was damaged"),
        "account": ("I forgot my password", "I cannot log in"),
        "returns": ("I want to return the shoes", "How do I send it back?"),
    },
    names=("Mia", "Tom", "Ada", "Leo"),
    forms=("{phrase}. Order {order} of {date}.{urgent} {name}",),
    orders=("{letters}-{number}", "{letters}{number}"),
    dates=("{year}-{month:02}-{day:02}", "{day} {name} {year}"),
    urgencies=("Urgent!",),
)
DESK: Final = Kind(
    phrases={
        "billing": (
            "The invoice has the wrong name",
            "There is a charge I do not know",
            "My invoice lacks the discount",
            "You charged the old price",
        ),
        "delivery": (
            "The courier never came",
            "The parcel went to the wrong house",
            "Delivery takes too long",
            "The courier lost the parcel",
        ),
        "account": (
            "My password does not work",
            "The login page says locked",
            "Please reset the password",
            "Login fails on my phone",
        ),
        "returns": (
            "The return label is missing",
            "I want to return one lamp",
            "I sent it back last week",
            "May I return a gift?",
        ),
    },
    names=("Ivy", "Max", "Eva", "Jon", "Kim", "Ben", "Zoe", "Sam"),
    forms=(
        "{name} here. {phrase} (order {order}, {date}).{urgent}",
        "{urgent} {phrase}. It is order {order}, bought {date}. Regards, {name}",
        "{phrase}: {order}, {date}.{urgent} {name}",
    ),
    orders=("{small} {number}", "{small}-{number}", "#{letters}{number}"),
    dates=("{name} {day}, {year}", "{day}.{month}.{year}"),
    urgencies=("This is urgent.", "Urgent, please."),
)
DEVELOPMENT: Final = Kind(
    phrases={
        "billing": ("I paid the invoice two times", "The charge was never explained", "Your invoice has no number"),
        "delivery": ("The parcel is still at the depot", "No courier rang", "Half of the parcel is gone"),
        "account": ("My login was closed", "I want a new password", "The login shows an error"),
        "returns": ("I returned the wrong book", "How long does a return take?", "Nobody collected my return"),
    },
    names=("Lea", "Finn", "Ruth", "Karl"),
    forms=(
        "Good day, this is {name}. {phrase}: {order} of {date}.{urgent}",
        "{phrase}; {order}, ordered {date}.{urgent} Thanks, {name}",
    ),
    orders=("{small}/{number}", "no. {letters}{number}"),
    dates=("{name} {day} in {year}", "{day}/{name}/{year}"),
    urgencies=("It is really urgent!", "Please hurry, it is urgent."),
)
HELD_OUT: Final = Kind(
    phrases={
        "billing": (
            "An invoice arrived twice",
            "The charge on my card is wrong",
            "I never got the invoice",
            "Why was I charged a fee?",
            "The invoice shows an old address",
            "Your charge came too early",
            "I need the invoice again",
            "The tax on my invoice is missing",
            "A charge was refused",
            "Please split the invoice",
            "I was charged for two",
            "The invoice is in the wrong currency",
        ),
        "delivery": (
            "Where is the parcel?",
            "The courier left the parcel in the rain",
            "Delivery did not happen",
            "The parcel was empty",
            "My neighbour has the parcel",
            "The courier was rude",
            "Can delivery be on Monday?",
            "The parcel was opened",
            "Delivery went to my old street",
            "The courier wants a signature",
            "Two parcels came, one is missing",
            "The delivery van left too soon",
        ),
        "account": (
            "The password mail never came",
            "I am locked out of the login",
            "How do I change my password?",
            "Login asks for a code",
            "My password was stolen",
            "Somebody else uses my login",
            "The login button does nothing",
            "A new password was refused",
            "I need a second login",
            "Login works only at night",
            "Please delete my login",
            "My password has expired",
        ),
        "returns": (
            "Can I return the jacket?",
            "The return was refused",
            "I want to send it back",
            "Where do I return it?",
            "The return costs too much",
            "I returned it in May",
            "My return was lost",
            "Is a return still possible?",
            "I have to send two chairs back",
            "The return form is broken",
            "Who pays for the return?",
            "You did not accept my return",
        ),
    },
    names=("Lara", "Paul", "Nina", "Omar", "Rosa", "Yann"),
    forms=(
        "Hello, my name is {name}. {phrase} Order {order}, {date}.{urgent}",
        "{phrase} -- {order} from {date}.{urgent} Yours, {name}",
    ),
    orders=("{small}{number}", "{letters} {number}", "No. {letters}-{number}"),
    dates=("{name} {day} {year}", "{day:02}.{month:02}.{year}"),
    urgencies=("It is very urgent.", "Very urgent!"),
)
QUEUES: Final = tuple(TEACHER.phrases)
KINDS: Final = (TEACHER, DESK, DEVELOPMENT, HELD_OUT)
