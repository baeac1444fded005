"""What becomes of the keys of another program's file: a table of names for each program, and one walk.

`Table.rows` says of each key whether it is used, refused or without effect, and changes nothing. `applied` makes
Flywheel's settings of such rows.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

from flywheel.config.section import put
from flywheel.errors import ConfigError
from flywheel.system.process import gpus_of_machine
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

CLOSE: Final = 0.8
"""How similar an unknown key is to the one that was probably meant (`difflib`)."""
T = TypeVar("T")
Outcome = Literal["taken over", "replaced by", "without effect", "refused"]


class Without(str):
    """In place of a value: the reason why a key has no effect."""


class Row(NamedTuple):
    """What becomes of one key of a file."""

    place: str
    """Its path in the file; empty for what the program assumes where a file sets nothing."""
    value: Any
    outcome: Outcome
    use: str = ""
    """Flywheel's key that gets a value; empty where none does."""
    made: Any = None
    """That value."""
    why: str = ""
    """Why the key has no effect or is refused, why no other value is possible, or what an assumption means."""
    hint: str = ""
    """What to do about a refused key."""
    note: str = ""
    """What the log says of a key without effect: the key that counts instead, or the one that was probably meant."""

    @property
    def meaning(self) -> str:
        return f"used as {self.use}" if self.use else f"{self.outcome}: {self.why}"


def _by_name(table: Mapping[str, T]) -> dict[str, T]:
    return {name: what for names, what in table.items() for name in names.split()}


class Table:
    """The keys of one program, by their names: dotted paths, several with spaces between them. A name in `unused` or
    `refused` may be `KEY=VALUE`, for one value."""

    def __init__(
        self,
        page: str,
        used: Mapping[str, str],
        *,
        made: Mapping[str, Callable[[Mapping[str, Any]], Any]],
        only: Mapping[str, tuple[tuple[Any, ...], str]],
        refused: Mapping[str, tuple[str, str]],
        unused: Mapping[str, str],
        closed: tuple[str, ...] = (),
        refuses_close: bool = False,
    ) -> None:
        """`page` is that of the documentation. `used` has Flywheel's key, of which `made` makes the value of all
        values of a file where it is no copy; of names with one key, the last that a file has counts. `only` has the
        values that are possible, and the reason; `refused` what to do instead, and the reason; `unused` the reason,
        also for the keys below a name. Unknown keys are refused in `closed` sections, and with `refuses_close` those
        that are close to a known one; others are without effect."""
        self.page, self.closed, self.refuses_close, self.made = page, closed, refuses_close, made
        self.uses, self.only = _by_name(used), _by_name(only)
        self.refused, self.reasons = _by_name(refused), _by_name(unused)
        self.names = {*self.uses, *self.only, *(name for name in self.reasons if "=" not in name)}

    def leaves(self, raw: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
        """All values of nested mappings by their paths. What is at a used key is one value."""
        for key, value in raw.items():
            path = f"{above}{key}"
            if isinstance(value, Mapping) and path not in self.uses and path not in self.only:
                yield from self.leaves(value, f"{path}.")
            else:
                yield path, value

    def rows(self, found: Iterable[tuple[str, str, Any]]) -> list[Row]:
        """The rows of keys, each with its place in the file, its name in the table, and its value. Keys without a
        value have none."""
        given = [each for each in found if each[2] is not None]
        values = {key: value for _, key, value in given}
        order = {name: at for at, name in enumerate(self.uses)}
        given.sort(key=lambda each: order.get(each[1], len(order)))
        rows = [self._row(place, key, value, values) for place, key, value in given]
        last = {row.use: row for row in rows if row.use}
        for at, row in enumerate(rows):
            if row.use and row.made != last[row.use].made:
                why = f"{last[row.use].place} has another value"
                rows[at] = Row(row.place, row.value, "without effect", why=why, note=why)
        return rows

    def _row(self, place: str, key: str, value: Any, values: Mapping[str, Any]) -> Row:
        possible, why = self.only.get(key, ((value,), ""))
        if refusal := self.refused.get(key):
            return Row(place, value, "refused", why=f"`{place}` is {refusal[1]}", hint=refusal[0])
        if refusal := self.refused.get(f"{key}={value}"):
            why = f"`{place}` is {value}, which Flywheel does not take: {refusal[1]}"
            return Row(place, value, "refused", why=why, hint=refusal[0])
        if value not in possible:
            shown = "given" if isinstance(value, list | Mapping) else value
            hint = f"Set it to {' or '.join(str(each).lower() for each in possible) or 'nothing'}, or remove it."
            return Row(place, value, "refused", why=f"`{place}` is {shown}: {why}", hint=hint)
        if key in self.only:
            return Row(place, value, "taken over", why=why)
        if key not in self.uses or f"{key}={value}" in self.reasons:
            return self._unused(place, key, value)
        use = self.uses[key]
        made = self.made[use](values) if use in self.made else value
        if isinstance(made, Without):
            return Row(place, value, "without effect", why=made)
        return Row(place, value, "taken over" if made == value else "replaced by", use, made)

    def _unused(self, place: str, key: str, value: Any) -> Row:
        meant = self.meant_by(key)
        if key.startswith(self.closed) or (meant and self.refuses_close):
            above = key.rpartition(".")[0]
            names = (name for name in (*self.uses, *self.only) if name.startswith(f"{above}."))
            known = ", ".join(name.removeprefix(f"{above}.") for name in names)
            hint = f" (did you mean `{meant}`?)" if meant else f" (known here: {known})" if known else ""
            return Row(place, value, "refused", why=f"unknown key `{place}`{hint}", hint="Correct it.")
        why = self.reasons.get(f"{key}={value}") or self.reason(key) or "Flywheel has nothing like it"
        return Row(place, value, "without effect", why=why, note=f"did you mean {meant}?" if meant else "")

    def reason(self, key: str) -> str:
        """Why a key, or those of a section around it, have no effect; empty if the table has no reason."""
        while key and key not in self.reasons:
            key = key.rpartition(".")[0]
        return self.reasons.get(key, "")

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


def applied(rows: Sequence[Row], attempted: str, name: str, page: str) -> dict[str, Any]:
    """Flywheel's settings of a file `name`. One line of the log lists the keys without effect. Raises ConfigError for
    refused keys."""
    if refused := [row for row in rows if row.outcome == "refused"]:
        more = f" The file has {quantity(len(refused) - 1, 'more refused key')}." if len(refused) > 1 else ""
        raise ConfigError(attempted, refused[0].why, f"{refused[0].hint}{more} See `flywheel docs {page}`.")
    made: dict[str, Any] = {}
    for row in rows:
        if row.use:
            put(made, row.use, row.made)
    unused = [
        f"{row.place} ({row.note})" if row.note else row.place for row in rows if row.outcome == "without effect"
    ]
    if unused:
        log.warning("%s: without effect: %s; see `flywheel docs %s`", name, ", ".join(unused), page)
    return made


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
