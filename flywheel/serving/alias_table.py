"""The aliases of one server and their target models, stored in a file so that they survive a restart.

Runs inside vLLM's process, so only the standard library (and `flywheel.files`) is imported. Does not know whether a
target is loaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from flywheel.files import PRIVATE, write_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """The target of an alias: a served model's name and, unless it is the base model, the adapter's directory and the
    hash of its verified files."""

    name: str
    path: str | None = None
    sha256: str | None = None


class TargetMismatchError(Exception):
    """A compare-and-set found another target than it expected."""

    def __init__(self, current: str) -> None:
        super().__init__(current)
        self.current = current


def read_aliases(file: Path) -> dict[str, Target]:
    """The saved aliases; none when the file is missing or damaged, with a warning in the latter case."""
    try:
        saved = json.loads(file.read_bytes())
        return {
            alias: Target(str(entry["target"]), entry.get("path"), entry.get("sha256"))
            for alias, entry in saved.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("cannot read the saved aliases in %s (%s): every alias starts at the base model", file, error)
        return {}


class AliasTable:
    """Alias → target, changed by compare-and-set. Lookups never wait; a change is on disk before it takes effect."""

    def __init__(self, aliases: Collection[str], base_model: str, file: Path | None, loaded: Collection[str]) -> None:
        """`loaded` are the adapters that the server starts with; saved targets outside them are ignored."""
        self.base_model = base_model
        self._file = file
        self._change = asyncio.Lock()
        self._targets = {alias: Target(base_model) for alias in aliases}
        for alias, target in (read_aliases(file) if file else {}).items():
            if target.name == base_model or target.name in loaded:
                self._targets[alias] = target
            else:
                log.warning("%s was %s, which is not loaded: it starts at the base model", alias, target.name)
                self._targets.setdefault(alias, Target(base_model))

    @property
    def targets(self) -> Mapping[str, Target]:
        return self._targets

    def resolve(self, model: str) -> str | None:
        """The target of `model`, or None when it is not an alias."""
        target = self._targets.get(model)
        return target.name if target else None

    async def point(self, alias: str, target: Target, expected: str | None = None) -> str:
        """Set the target of `alias` and return the previous model name.

        Raises TargetMismatchError when `expected` is given and is not the present target, and OSError when the file
        cannot be written; both change nothing.
        """
        async with self._change:
            current = self._targets.get(alias, Target(self.base_model)).name
            if expected is not None and expected != current:
                raise TargetMismatchError(current)
            changed = {**self._targets, alias: target}
            if self._file:
                saved = {name: {"target": t.name, "path": t.path, "sha256": t.sha256} for name, t in changed.items()}
                await asyncio.to_thread(write_json, self._file, saved, mode=PRIVATE)
            self._targets = changed
            return current
