"""What becomes of the keys of another program's file: a table of names for each program, and one walk.

`Table.rows` says of each key whether it is used, refused or without effect, and changes nothing. `settings_in` has
Flywheel's settings of such rows, and `check` refuses them or says what has no effect.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from flywheel.config.section import put
from flywheel.errors import ConfigError
from flywheel.secrets import REDACTED, without_secrets
from flywheel.system.process import gpus_of_machine
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

CLOSE: Final = 0.8
"""How similar an unknown key is to the one that was probably meant (`difflib`)."""
SECTIONS: Final = frozenset((
    "state", "sources", "ingest", "privacy", "judge", "filter", "trigger", "model", "training", "rollout", "tracking",
    "gate", "targets", "serving", "deploy", "ray", "retention", "daemon", "notify", "export",
))  # fmt: skip
"""The sections of Flywheel's own files, which another program's file may have as well."""
Outcome = Literal["taken over", "replaced by", "without effect", "refused"]


class Without(str):
    """Of a key or a value: the reason why it has no effect."""


class Refusal(NamedTuple):
    """Why a key or a value is refused, and what to do."""

    why: str
    hint: str


class Made(NamedTuple):
    """Flywheel's key, and what makes its value of all values of a file: also `Without` or `Refusal`."""

    use: str
    of: Callable[[Mapping[str, Any]], Any]


class Only(NamedTuple):
    """The values that are possible, and the reason. Without a `use`, they need nothing."""

    possible: tuple[Any, ...]
    why: str
    use: str | Made = ""


Entry = str | Made | Only | Refusal
"""What becomes of a key: it is copied to Flywheel's key of that name, or it is one of the others, or `Without`."""


class Row(NamedTuple):
    """What becomes of one key of a file."""

    place: str
    """Its path in the file; empty for what the program assumes where a file sets nothing."""
    value: Any
    outcome: Outcome
    use: str = ""
    """Flywheel's key that gets a value; empty where none does. Of a refused row, the key that would need one."""
    made: Any = None
    """That value."""
    why: str = ""
    """Why the key has no effect or is refused, why no other value is possible, or what an assumption means."""
    hint: str = ""
    """What to do about a refused key."""
    note: str = ""
    """What the log says of a key without effect: the key that counts instead, or the one that was probably meant."""

    @property
    def sets(self) -> bool:
        """Whether Flywheel's key gets the value."""
        return bool(self.use) and self.outcome != "refused"


class Table:
    """The keys of one program, by their names: dotted paths, several with spaces between them. A name may also be
    `KEY=VALUE`, for one value that is refused or without effect."""

    def __init__(
        self, page: str, entries: Mapping[str, Entry], *, closed: tuple[str, ...] = (), refuses_close: bool = False
    ) -> None:
        """`page` is that of the documentation. Of names with one key of Flywheel's, the last that a file has counts.
        The keys below a name without effect have none either. Unknown keys are refused in `closed` sections, and with
        `refuses_close` those that are close to a known one; others are without effect."""
        self.page, self.closed, self.refuses_close = page, closed, refuses_close
        self.entries = {name: entry for names, entry in entries.items() for name in names.split()}
        self.uses = {name: use for name, entry in self.entries.items() if (use := _use_of(entry))}
        self.names = {
            name for name, entry in self.entries.items() if "=" not in name and not isinstance(entry, Refusal)
        }

    def leaves(self, raw: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
        """All values of nested mappings by their paths. What is at a used key is one value."""
        for key, value in raw.items():
            path = f"{above}{key}"
            if isinstance(value, Mapping) and path not in self.uses and not isinstance(self.entries.get(path), Only):
                yield from self.leaves(value, f"{path}.")
            else:
                yield path, value

    def rows(self, found: Iterable[tuple[str, str, Any]], about: Mapping[str, Any] | None = None) -> list[Row]:
        """The rows of keys, each with its place in the file, its name in the table, and its value. Keys without a
        value have none. `about` is what functions of `made` get besides the values."""
        given = [each for each in found if each[2] is not None]
        values = {**(about or {}), **{key: value for _, key, value in given}}
        order = {name: at for at, name in enumerate(self.uses)}
        given.sort(key=lambda each: order.get(each[1], len(order)))
        rows = [self._row(place, key, value, values) for place, key, value in given]
        last = {row.use: row for row in rows if row.use}
        refusals = dict[tuple[str, str], str]()
        for at, row in enumerate(rows):
            if row.outcome == "refused" and (use := self.uses.get(given[at][1])):
                # Keys that make one value are refused once.
                first = refusals.setdefault((use, row.hint), row.place)
                if first != row.place:
                    rows[at] = Row(row.place, row.value, "without effect", why=f"{first} is refused")
            if row.use and row.made != last[row.use].made:
                why = f"{last[row.use].place} has another value"
                rows[at] = Row(row.place, row.value, "without effect", why=why, note=why)
        return rows

    def _row(self, place: str, key: str, value: Any, values: Mapping[str, Any]) -> Row:
        of_value = self.entries.get(f"{key}={value}")
        entry = self.entries.get(key) if of_value is None else of_value
        if isinstance(entry, Refusal):
            shown = f"{value}, which Flywheel does not take: " if of_value else ""
            return Row(place, value, "refused", why=f"`{place}` is {shown}{entry.why}", hint=entry.hint)
        if isinstance(entry, Only):
            if value not in entry.possible:
                shown = "given" if isinstance(value, list | Mapping) else value
                possible = " or ".join(str(each).lower() for each in entry.possible) or "nothing"
                why, hint = f"`{place}` is {shown}: {entry.why}", f"Set it to {possible}, or remove it."
                return Row(place, value, "refused", why=why, hint=hint)
            if not entry.use:
                return Row(place, value, "taken over", why=entry.why)
            entry = entry.use
        if not (use := _use_of(entry)):
            return self._unused(place, key, value)
        made = entry.of(values) if isinstance(entry, Made) else value
        if isinstance(made, Without):
            return Row(place, value, "without effect", why=made)
        if isinstance(made, Refusal):
            return Row(place, value, "refused", why=f"`{place}`: {made.why}", hint=made.hint)
        return Row(place, value, "taken over" if made == value else "replaced by", use, made)

    def _unused(self, place: str, key: str, value: Any) -> Row:
        meant = self.meant_by(key)
        if f"{key}.".startswith(self.closed) and any(name.startswith(f"{key}.") for name in self.names):
            why = f"`{place}` is a {type(value).__name__}, not a mapping"
            return Row(place, value, "refused", why=why, hint="Correct it.")
        of_value = self.entries.get(f"{key}={value}")
        reason = of_value if isinstance(of_value, Without) else self.reason(key)
        if (key.startswith(self.closed) and not reason) or (meant and self.refuses_close):
            above = key.rpartition(".")[0]
            names = (name for name, entry in self.entries.items() if not isinstance(entry, Without | Refusal))
            known = ", ".join(name.removeprefix(f"{above}.") for name in names if name.startswith(f"{above}."))
            hint = f" (did you mean `{meant}`?)" if meant else f" (known here: {known})" if known else ""
            return Row(place, value, "refused", why=f"unknown key `{place}`{hint}", hint="Correct it.")
        note = f"did you mean {meant}?" if meant else ""
        return Row(place, value, "without effect", why=reason or "Flywheel has nothing like it", note=note)

    def reason(self, key: str) -> str:
        """Why a key, or those of a section around it, have no effect; empty if the table has no reason."""
        while key:
            if isinstance(found := self.entries.get(key), Without):
                return found
            key = key.rpartition(".")[0]
        return ""

    def knows(self, key: str) -> bool:
        """Whether it is a key of the program, or was probably meant to be one."""
        return key in self.names or bool(self.reason(key) or self.meant_by(key))

    def meant_by(self, key: str) -> str:
        """The key of the table that an unknown one was probably meant to be; empty if there is none."""
        above = ""
        for part in key.split("."):
            known = {name.removeprefix(above).partition(".")[0] for name in self.names if name.startswith(above)}
            if part not in known:
                close = difflib.get_close_matches(part, sorted(known), n=1, cutoff=CLOSE)
                return above + close[0] if close else ""
            above += f"{part}."
        return ""


def _use_of(entry: Entry | None) -> str:
    """Flywheel's key; empty if there is none."""
    if isinstance(entry, Only):
        entry = entry.use
    if isinstance(entry, Made):
        return entry.use
    return entry if isinstance(entry, str) and not isinstance(entry, Without) else ""


def settings_in(rows: Iterable[Row]) -> dict[str, Any]:
    """Flywheel's settings that rows make."""
    made: dict[str, Any] = {}
    for row in rows:
        if row.sets:
            put(made, row.use, row.made)
    return made


def check(rows: Sequence[Row], attempted: str, name: str, page: str) -> None:
    """Log one line with the keys of a file `name` that have no effect. Raises ConfigError, which names all refused
    keys."""
    refused = [row for row in rows if row.outcome == "refused"]
    if len(refused) == 1:
        raise ConfigError(attempted, refused[0].why, f"{refused[0].hint} See `flywheel docs {page}`.")
    if refused:
        lines = "".join(f"\n- {row.why.rstrip('.')}. {row.hint}" for row in refused)
        why = f"{quantity(len(refused), 'key')} are refused (see `flywheel docs {page}`):{lines}"
        raise ConfigError(attempted, why)
    unused = [
        f"{row.place} ({row.note})" if row.note else row.place for row in rows if row.outcome == "without effect"
    ]
    if unused:
        log.warning("%s: without effect: %s; see `flywheel docs %s`", name, ", ".join(unused), page)


def with_names(why: str, origins: Mapping[str, str]) -> str:
    """A sentence about settings, with the caller's keys for those of Flywheel that they set (`origins`)."""
    notes = []
    for ours, theirs in origins.items():
        section, _, key = ours.rpartition(".")
        named = re.sub(rf"(?<![\w.]){re.escape(ours)}(?![\w.])", theirs, why)
        if named == why and f"`{section}`: " in why and re.search(rf"(?<![\w.]){key}(?!\w)", why):
            # A rule about several keys of a section.
            notes.append(f"{key} is `{theirs}`")
        why = named
    return f"{why} ({', '.join(notes)})" if notes else why


def without_keys(row: Row) -> Row:
    """The row without API keys and the like. A value that is one becomes the name of its environment variable."""
    name = row.place.rpartition(".")[2]
    value, made = without_secrets(row.value, name), without_secrets(row.made, name)
    if value is None and row.value is not None:
        value = f"${variable}" if (variable := variable_of(row.value)) else REDACTED
    return row._replace(value=value, made=made)


def variable_of(value: Any, named: Sequence[str] = ()) -> str:
    """The environment variable that has this value, from which `${oc.env:…}` may have filled it in: the first of the
    `named` ones, or else of all; empty without one."""
    return next((name for name in (*named, *os.environ) if os.environ.get(name) == value), "")


def fit_engines(rollout: dict[str, Any], rows: Iterable[Row], name: str) -> None:
    """Make engines and GPUs per engine as few as the machine has GPUs for: the file `name` was written for another
    one. The largest engines that fit beside the trainer come first, then as many as fit; the size stays a divisor of
    the one asked for, because it must divide the model's heads."""
    engines, size = asked = [rollout.pop(key, 1) for key in ("engines", "tensor_parallel")]
    if all(type(each) is int and each > 0 for each in asked) and asked != [1, 1]:
        gpus = gpus_of_machine()
        size = max(each for each in range(1, size + 1) if size % each == 0 and (each == 1 or each < gpus))
        engines = max(1, min(engines, (gpus - 1) // size))
        if [engines, size] != asked:
            places = (row.place for row in rows if row.use in ("rollout.engines", "rollout.tensor_parallel"))
            log.warning(
                "%s: %s: this machine has %s, and rounds use %d × %d instead of %d × %d (engines × GPUs of each)",
                name, ", ".join(places), quantity(gpus, "GPU"), engines, size, *asked,
            )  # fmt: skip
    rollout |= {key: each for key, each in (("engines", engines), ("tensor_parallel", size)) if each != 1}
