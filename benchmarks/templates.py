"""Dialogues of the genuine Studio databases as templates: the same rows again with other ids, times and texts.

A dialogue is what one agent's memory held: one trace or several, in the order in which Studio stored their spans.
This module turns rows into rows and knows how many replies they tell; it never writes a database.
"""

from __future__ import annotations

import base64
import json
import random
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).parent.parent / "tests" / "data" / "studio"
SOURCES: Final = {"old": {"old": 1.0}, "new": {"new_v1": 0.6, "new_v2": 0.15, "new_oldclient": 0.25}}
"""Which fixture databases a schema's dialogues are taken from, and in which proportion."""
WORDS: Final = Path(__file__).parent / "words.txt"
"""What longer texts are made of, one word a line."""
SPECIAL_SHARE: Final = 0.08
"""Share of dialogues with an error, an interruption, a nested agent, a pipeline or a lost span."""

Row = tuple[Any, ...]

_FIRST: Final = int(datetime(2026, 11, 21, tzinfo=UTC).timestamp())
_MIN_ANCHOR: Final = 6
_NO_IDS: Final = frozenset({"unknown", "[no_session_id]"})
_TOKEN: Final = (
    r"(?P<clock>2026-11-2\d[ T]\d\d:\d\d:\d\d)"
    r"|(?<!\d)(?P<seconds>1795\d{6})(?=\d{9}(?!\d))"
    r"|(?<![0-9A-Za-z])(?P<hex>[0-9a-f]{32}|[0-9a-f]{24}|[0-9a-f]{20}|[0-9a-f]{16})(?![0-9A-Za-z])"
    # A short UUID, told from a long word by a digit or many capitals.
    r"|(?<![0-9A-Za-z])(?P<short>(?=[A-Za-z]*[2-9]|(?:[a-z]*[A-Z]){6})[2-9A-HJ-NP-Za-km-z]{22})(?![0-9A-Za-z])"
)


@dataclass(frozen=True, slots=True)
class Truth:
    """What a reader is to find: `replies` is everything that an agent was asked, `tasks` the part to learn from."""

    spans: int = 0
    traces: int = 0
    replies: int = 0
    tasks: int = 0
    unfinished: int = 0

    def __add__(self, other: Truth) -> Truth:
        return Truth(
            self.spans + other.spans,
            self.traces + other.traces,
            self.replies + other.replies,
            self.tasks + other.tasks,
            self.unfinished + other.unfinished,
        )


class _RowTemplate:
    """One row with holes: `cells` are the constants, `holes` what is written over them."""

    def __init__(self, cells: Sequence[Any], holes: list[tuple[int, str, tuple[int, ...]]]) -> None:
        self._cells = list(cells)
        self._holes = [(column, text, itemgetter(*slots)) for column, text, slots in holes]

    def fill(self, values: Sequence[str]) -> Row:
        cells = self._cells.copy()
        for column, text, pick in self._holes:
            cells[column] = text % pick(values)
        return tuple(cells)


class Dialogue:
    """A template. `fill` gives its rows with fresh ids, moved to another time, with longer and other texts."""

    def __init__(self, source: str, rows: Sequence[Row], labels: Sequence[dict[str, Any]]) -> None:
        self.source = source
        self.truth = Truth(
            len(rows),
            len({label["trace_id"] for label in labels}),
            len(labels),
            sum(map(_is_task, labels)),
            sum(not label["span_in_db"] for label in labels),
        )
        self.is_special = self.truth.tasks < self.truth.replies or any(label["role"] != "root" for label in labels)
        self.is_plain = not self.is_special and all(_is_plain(label) for label in labels)
        self._makers: list[Callable[[_Instance], str]] = []
        self._slots: dict[tuple[str, str], int] = {}
        self._conversations = {label["conversation_id_in_db"] for label in labels} - _NO_IDS
        anchors = sorted(filter(None, map(_anchor, _texts(labels))), key=len, reverse=True)
        words = "|".join(map(re.escape, dict.fromkeys([*sorted(self._conversations), *anchors])))
        self._token = re.compile(f"(?P<known>{words})|{_TOKEN}" if words else _TOKEN)
        self._first_second = 0
        self._first_second = min(map(self._second, rows))
        self._rows = [self._template(row) for row in rows]

    def fill(self, rng: random.Random, second: int, conversation: str | None) -> list[Row]:
        """Rows that begin at `second` (since 1970), in `conversation` or one of their own."""
        instance = _Instance(rng, second - self._first_second, conversation)
        values = [make(instance) for make in self._makers]
        return [row.fill(values) for row in self._rows]

    def _second(self, row: Row) -> int:
        found = [self._moment(m) for cell in row if isinstance(cell, str) for m in self._token.finditer(cell)]
        return min((second for second in found if second), default=_FIRST)

    @staticmethod
    def _moment(match: re.Match[str]) -> int:
        if match.lastgroup == "clock":
            return int(datetime.fromisoformat(match.group()).replace(tzinfo=UTC).timestamp())
        return int(match.group()) if match.lastgroup == "seconds" else 0

    def _template(self, row: Row) -> _RowTemplate:
        holes = []
        for column, cell in enumerate(row):
            if not isinstance(cell, str):
                continue
            text, slots, at = [], [], 0
            for match in self._token.finditer(cell):
                text += [cell[at : match.start()].replace("%", "%%"), "%s"]
                slots.append(self._slot(match))
                at = match.end()
            if slots:
                text.append(cell[at:].replace("%", "%%"))
                holes.append((column, "".join(text), tuple(slots)))
        return _RowTemplate(row, holes)

    def _slot(self, match: re.Match[str]) -> int:
        kind, token = str(match.lastgroup), match.group()
        if (kind, token) not in self._slots:
            self._slots[kind, token] = len(self._makers)
            self._makers.append(self._maker(kind, token, self._moment(match)))
        return self._slots[kind, token]

    def _maker(self, kind: str, token: str, moment: int) -> Callable[[_Instance], str]:
        if kind == "clock":
            between = token[10]
            return lambda made: datetime.fromtimestamp(moment + made.shift, UTC).strftime(
                f"%Y-%m-%d{between}%H:%M:%S"
            )
        if kind == "seconds":
            return lambda made: str(moment + made.shift)
        if kind == "short":
            return lambda made: short_id(made.rng)
        if kind == "hex":
            return lambda made: f"{made.rng.getrandbits(4 * len(token)):0{len(token)}x}"
        if token in self._conversations:
            own = (lambda rng: f"{rng.getrandbits(128):032x}") if len(token) == 32 else short_id
            return lambda made: made.conversation or own(made.rng)
        return lambda made: f"{token} {sentence(made.rng)}"


@dataclass(frozen=True, slots=True)
class _Instance:
    """What one filling of a template has in common. `shift` is in seconds."""

    rng: random.Random
    shift: int
    conversation: str | None


def short_id(rng: random.Random) -> str:
    """22 letters and digits."""
    return base64.b64encode(rng.randbytes(17), b"xy")[:22].decode()


def sentence(rng: random.Random) -> str:
    """Some words without anything that JSON or Python would escape."""
    words = rng.choices(_words(), k=rng.randint(4, 16))
    return f"{' '.join(words).capitalize()} {rng.randrange(10, 100_000)}."


@cache
def _words() -> list[str]:
    return WORDS.read_text().split()


@cache
def dialogues(source: str) -> tuple[Dialogue, ...]:
    """The templates of one fixture database: those of its dialogues that left a trace."""
    spoken: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in (DATA / f"{source}.labels.jsonl").read_text().splitlines():
        label = json.loads(line)
        if label["role"] != "no_span":
            spoken[label["dialogue"]].append(label)
    by_trace: dict[str, list[Row]] = defaultdict(list)
    order: dict[Row, int] = {}
    with open_read_only(source) as database:
        for number, row in enumerate(database.execute("SELECT * FROM span_table ORDER BY rowid")):
            by_trace[row[1]].append(row)
            order[row] = number
    database.close()
    found = []
    for labels in spoken.values():
        traces = {label["trace_id"] for label in labels}
        found.append(
            Dialogue(source, sorted((row for t in traces for row in by_trace[t]), key=order.__getitem__), labels)
        )
    return tuple(found)


def open_read_only(source: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{DATA / source}.sqlite?mode=ro", uri=True)


def _is_task(label: dict[str, Any]) -> bool:
    is_shown = label["role"] in ("root", "pipeline_last") and label["span_in_db"]
    return bool(is_shown and label["kind"] != "interrupted" and label["status"] == "OK")


def _is_plain(label: dict[str, Any]) -> bool:
    """One text asked and one answered, whose Python representations need no escapes."""
    texts = (label["query"] or "", label["answer"] or "")
    return all(text.isascii() and text and not set(text) & set("'\"\n[]()=") for text in texts) and not any(
        label.get(key) for key in ("query_parts", "image", "structured")
    )


def _texts(labels: Sequence[dict[str, Any]]) -> Iterator[str]:
    for label in labels:
        yield from label.get("query_parts") or (label["query"] or "",)
        yield label["answer"] or ""


def _anchor(text: str) -> str:
    """The longest part of a text that is written alike in JSON and in a Python literal; empty if it is too short, or
    a single word, which could be a name of the format."""
    longest = max(re.findall(r"[0-9A-Za-z\u4e00-\u9fff ,.:;+*/^?!-]+", text), key=len, default="").strip()
    is_text = (" " in longest and any(map(str.isalpha, longest))) or not longest.isascii()
    return longest if len(longest) >= _MIN_ANCHOR and is_text else ""


class Talk:
    """An endless draw of dialogues in the proportions of a schema."""

    def __init__(self, schema: str, *, plain: bool = False, special: bool = True) -> None:
        self._choices: list[Dialogue] = []
        self._weights: list[float] = []
        for source, share in SOURCES[schema].items():
            usual = [d for d in dialogues(source) if (d.is_plain if plain else not d.is_special)]
            odd = [d for d in dialogues(source) if d.is_special and special and not plain]
            for group, part in ((usual, 1 - SPECIAL_SHARE if odd else 1.0), (odd, SPECIAL_SHARE)):
                self._choices += group
                self._weights += [share * part / max(1, len(group))] * len(group)
        self._by_size: dict[int, list[Dialogue]] = defaultdict(list)
        for dialogue in self._choices:
            self._by_size[dialogue.truth.spans].append(dialogue)

    def draw(self, rng: random.Random, spans: int) -> list[Dialogue]:
        """Dialogues that have exactly `spans` spans together."""
        drawn: list[Dialogue] = []
        left = spans
        tail = 3 * max(self._by_size)
        while left > tail:
            drawn += (
                some := rng.choices(self._choices, self._weights, k=max(1, (left - tail) // max(self._by_size)))
            )
            left -= sum(dialogue.truth.spans for dialogue in some)
        return drawn + [rng.choice(self._by_size[size]) for size in self._sizes(left)]

    def _sizes(self, left: int) -> list[int]:
        """Sizes of templates that add up to `left`, as different as they can be."""
        ways: list[Counter[int] | None] = [Counter()]
        for total in range(1, left + 1):
            before = [
                way + Counter([size])
                for size in self._by_size
                if size <= total and (way := ways[total - size]) is not None
            ]
            ways.append(max(before, key=len, default=None))
        sizes = ways[left]
        if sizes is None:
            raise ValueError(f"no dialogues have {left} spans together; ask for more")
        return list(sizes.elements())
