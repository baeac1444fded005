"""The aliases of one server: their target models, stored in a file that survives restarts, as clients see them.

An alias whose target is not known or not loaded at the start waits: requests to it are refused with the reason until
its target is set. During an A/B test, the version that is loaded answers alone until then. Does not know what is
loaded later.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from flywheel.serving import routes
from flywheel.serving.alias_target import AliasTarget
from flywheel.serving.server.asgi import error_json
from flywheel.system.files import PRIVATE, write_json

_UNKNOWN: Final = re.compile(r"The model `(.*)` does not exist", re.DOTALL)


class TargetMismatchError(Exception):
    """A compare-and-set found another target or another revision than it expected."""

    def __init__(self, current: str) -> None:
        super().__init__(current)
        self.current = current


def read_aliases(file: Path) -> tuple[dict[str, AliasTarget], str]:
    """The saved aliases, none if the file is missing; and why a damaged file cannot be read."""
    try:
        saved = json.loads(file.read_bytes())
        return {alias: AliasTarget.of_json(entry) for alias, entry in saved.items()}, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {}, f"the saved aliases in {file} cannot be read ({error})"


def write_aliases(file: Path, targets: Mapping[str, AliasTarget], *, mode: int = PRIVATE) -> None:
    """Write what `read_aliases` reads. Raises OSError."""
    write_json(file, {name: each.as_json() for name, each in targets.items()}, mode=mode)


class AliasTable:
    """Alias → target, changed by compare-and-set. Lookups never wait; a change is on disk before it takes effect."""

    def __init__(
        self,
        aliases: Collection[str],
        base_model: str,
        file: Path | None,
        loaded: Collection[str],
        waiting: Mapping[str, str],
    ) -> None:
        """`loaded` are the adapters that the server starts with. `waiting` are the aliases that are known not to be
        answered yet, with the reason; saved targets that are not loaded are added."""
        self.base_model = base_model
        self._file = file
        self._change = asyncio.Lock()
        self._first_revision = secrets.randbits(48)  # Revisions of a server that ran before are none of this one.
        self._changes = Counter[str]()
        saved, damage = read_aliases(file) if file else ({}, "")
        self._targets = {alias: AliasTarget(base_model) for alias in aliases} | saved
        self.waiting: Mapping[str, str] = {}
        """The aliases that are not answered, and why not."""
        self.missing: Mapping[str, str] = {}
        """The aliases in an A/B test of which one version is not loaded here, and that version."""
        for alias, target in self._targets.items():
            lost = [each.name for each in target.versions if each.name not in (base_model, *loaded)]
            if len(lost) == len(target.versions):
                why = " and ".join(f"{name} is not loaded" for name in lost)
                self._set(alias, waiting.get(alias, why), "")
            else:
                self._set(alias, waiting.get(alias, damage), "".join(lost))
        self._sources = {alias: "restored" if alias in saved else "base" for alias in aliases}

    @property
    def targets(self) -> Mapping[str, AliasTarget]:
        return self._targets

    def counts(self) -> Counter[str]:
        """How many of the server's own aliases are `waiting`, answered by the `base` model because nothing else is
        recorded, `restored` from the file, or `confirmed` since the start."""
        return Counter("waiting" if alias in self.waiting else where for alias, where in self._sources.items())

    def revision(self, alias: str) -> int:
        """A number that each `point` of the alias increases by one, also one that does not change its target."""
        return self._first_revision + self._changes[alias]

    async def point(
        self,
        alias: str,
        target: AliasTarget,
        expected: str | None = None,
        waiting: str = "",
        missing: str = "",
        revision: int | None = None,
    ) -> str:
        """Set the target of `alias` and return the previous model name. With a reason in `waiting`, requests to it
        are refused, as before a swap that is taken back. `missing` is the version of the A/B test that is not loaded.

        Raises TargetMismatchError when `expected` is given and is not the present target, or `revision` is not the
        present one, and OSError when the file cannot be written; all change nothing.
        """
        async with self._change:
            current = self._targets.get(alias, AliasTarget(self.base_model)).name
            if expected is not None and expected != current:
                raise TargetMismatchError(current)
            if revision is not None and revision != self.revision(alias):
                raise TargetMismatchError(f"{current}, and was set since")
            changed = {**self._targets, alias: target}
            if self._file:
                await asyncio.to_thread(write_aliases, self._file, changed)
            self._targets = changed
            self._changes[alias] += 1
            self._set(alias, waiting, missing)
            if alias in self._sources:
                self._sources[alias] = "confirmed"
            return current

    def _set(self, alias: str, waiting: str, missing: str) -> None:
        self.waiting = {name: why for name, why in {**self.waiting, alias: waiting}.items() if why}
        self.missing = {name: lost for name, lost in {**self.missing, alias: missing}.items() if lost}


def listed(
    status: int,
    body: bytes,
    targets: Mapping[str, AliasTarget],
    created: int,
    may_ask: Callable[[str], bool],
    model: str,
) -> tuple[int, bytes]:
    """The list of the models that the client `may_ask` for, with the aliases; or only `model` of these, if named.

    `created` is the creation time of aliases in seconds since 1970.
    """
    try:
        listing = json.loads(body)
        cards: list[dict[str, Any]] = [card for card in listing["data"] if may_ask(card["id"])]
    except (ValueError, KeyError, TypeError):
        return status, body
    cards += [
        {"id": alias, "object": "model", "created": created, "owned_by": routes.ALIAS_OWNER, "root": target.name}
        for alias, target in targets.items()
    ]
    if not model:
        return status, json.dumps({**listing, "data": cards}).encode()
    card = next((card for card in cards if card["id"] == model), None)
    return (status, json.dumps(card).encode()) if card else (404, error_json(404, unknown_model(model, targets)))


def unknown_model(model: str, aliases: Collection[str]) -> str:
    return f"The model `{model[:100]}` does not exist. This server answers as {', '.join(aliases)}."


def not_found(status: int, body: bytes, aliases: Collection[str]) -> tuple[int, bytes]:
    """An answer of 404 or 405 in OpenAI's form. The text about an unknown model names the aliases."""
    try:
        refusal = json.loads(body)
        if unknown := _UNKNOWN.match(refusal["error"]["message"]):
            refusal["error"]["message"] = unknown_model(unknown[1], aliases)
        return status, json.dumps(refusal).encode()
    except (ValueError, KeyError, TypeError):  # of the web framework, for a path that vLLM does not have
        why = "this server has no such path" if status == 404 else "this path does not take the method"
        return status, error_json(status, why)
