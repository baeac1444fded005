"""Made data of agents with a thousand tools, and conversations that call them.

In the data set `disjoint`, tools are 32 actions on 32 objects, and users say other words for both, and none of the
tool's. In `overlap`, tools are actions in 1,024 systems with names of their own, and users say the words of the tool,
as where they know the names of a company's systems. Both are made by this script, by a seed: no user wrote them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from flywheel.records.trace import Reply
from flywheel.retrieval.texts import words_of

DataSet = Literal["disjoint", "overlap"]
DATA_SETS: Final[tuple[DataSet, ...]] = ("disjoint", "overlap")
# The word of the tool, and two of users.
ACTIONS: Final = """
create make set-up|delete remove drop|list show enumerate|update change edit|send mail dispatch|approve accept confirm
archive shelve stow|assign give allot|cancel abort undo|copy duplicate clone|export save download|import load upload
merge combine unite|split divide separate|rename retitle relabel|share publish circulate|lock freeze protect
unlock open release|schedule plan book|search find seek|sort order arrange|summarise condense shorten
translate render interpret|validate check verify|compare contrast match|count tally number|print output typeset
restore recover revive|sign initial endorse|pay settle remit|refund reimburse repay|track follow monitor
""".replace("\n", "|").strip("|")
OBJECTS: Final = """
invoice bill receipt|customer client buyer|employee worker colleague|meeting appointment gathering|task job errand
document file paper|picture image photo|video film clip|contract agreement deal|payment transfer remittance
product article item|shipment parcel delivery|vehicle car van|building house property|room chamber hall
ticket issue complaint|password secret passphrase|account profile login|report analysis study|budget funds allowance
holiday vacation leave|salary wage income|course class lesson|exam test quiz|recipe dish meal|song tune melody
flight plane trip|hotel inn lodging|device machine gadget|sensor probe detector|backup snapshot safeguard
newsletter bulletin digest
""".replace("\n", "|").strip("|")
FORMS: Final = (
    "Please {action} the {thing} for me", "Can you {action} a {thing}?", "I want you to {action} that {thing}",
    "{action} my {thing}, will you", "We have to {action} this {thing} today", "Kindly {action} our {thing} now",
)  # fmt: skip
OFFERED: Final = 20
START: Final = datetime(2026, 1, 2, tzinfo=UTC)


def _synonyms(text: str) -> list[tuple[str, tuple[str, ...]]]:
    found = [each.split() for each in text.split("|")]
    return [(own, tuple(other.replace("-", " ") for other in others)) for own, *others in found]


def _names(data_set: DataSet) -> list[tuple[str, str]]:
    """The action and the object of each tool."""
    actions, objects = ([own for own, _ in _synonyms(text)] for text in (ACTIONS, OBJECTS))
    if data_set == "disjoint":
        return list(itertools.product(actions, objects))
    first, second = ([a + b for a in consonants for b in "aeio"] for consonants in ("bdfgklmn", "prstvwxz"))
    systems = [one + other for one, other in itertools.product(first, second)]
    return [(actions[place % len(actions)], system) for place, system in enumerate(systems)]


def tools(data_set: DataSet) -> dict[str, dict[str, Any]]:
    """1,024 definitions in the OpenAI chat form, by name."""
    found = {}
    for action, thing in _names(data_set):
        parameters = {"type": "object", "properties": {"id": {"type": "string", "description": f"Which {thing}"}}}
        function = {"name": f"{action}_{thing}", "description": f"{action} {thing}", "parameters": parameters}
        found[f"{action}_{thing}"] = {"type": "function", "function": function}
    return found


def replies(data_set: DataSet, conversations: int, seed: int) -> Iterator[Reply]:
    """Replies with one call each, of which one in ten fails; one to three in a conversation."""
    drawn, every = random.Random(seed), tools(data_set)
    names, actions, objects = list(every), dict(_synonyms(ACTIONS)), dict(_synonyms(OBJECTS))
    number = 0
    for conversation in range(conversations):
        history: list[dict[str, Any]] = []
        for turn in range(drawn.randint(1, 3)):
            name = drawn.choice(names)
            action, thing = name.split("_")
            words = {"action": action, "thing": thing}
            if data_set == "disjoint":
                words = {"action": drawn.choice(actions[action]), "thing": drawn.choice(objects[thing])}
            query = drawn.choice(FORMS).format(**words)
            offered = [name, *drawn.sample(names, OFFERED - 1)]
            result = "Error: not possible" if drawn.random() < 0.1 else f"ok {number}"
            call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps({})}}
            yield Reply(
                span_id=f"{number:016x}",
                trace_id=f"{number:032x}",
                conversation_id=f"{data_set}-{seed}-{conversation}",
                agent="office",
                query=query,
                answer="Done.",
                started_at=START + timedelta(minutes=number),
                ended_at=START + timedelta(minutes=number, seconds=5),
                turn=turn,
                history=tuple(history),
                trajectory=(
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result},
                ),
                tools=tuple(every[each] for each in dict.fromkeys(offered)),
            )
            history += [{"role": "user", "content": query}, {"role": "assistant", "content": "Done."}]
            number += 1


def words() -> set[str]:
    """All words of both data sets, for the vocabulary of a tiny encoder."""
    found = {word for data_set in DATA_SETS for one in tools(data_set).values() for word in words_of(json.dumps(one))}
    synonyms = (each for text in (ACTIONS, OBJECTS) for _, others in _synonyms(text) for each in others)
    return found.union(*(words_of(text) for text in (*synonyms, *FORMS, "done")))
