"""The aliases of one server: which served model each stands for, kept in a file so that a restart answers the same.

Used inside vLLM's own process, so nothing beyond the standard library (and `flywheel.files`) is imported. What a
target means, and whether it is loaded, is not known here.
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
    """What an alias stands for: a served model's name and, unless it is the base model, the adapter's directory and
    the hash of its files as they were proven."""

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
    """Alias → target, changed by compare-and-set. Lookups never wait; a change is on disk before it counts."""

    def __init__(self, aliases: Collection[str], base_model: str, file: Path | None, loaded: Collection[str]) -> None:
        """`loaded` are the adapters that the server starts with: a saved target outside them is not taken up."""
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
        """The model that `model` stands for, or None when it is no alias."""
        target = self._targets.get(model)
        return target.name if target else None

    async def point(self, alias: str, target: Target, expected: str | None = None) -> str:
        """Let `alias` stand for `target` and return the name it stood for before.

        Raises TargetMismatchError, changing nothing, when `expected` is given and is not what it stands for now, and
        OSError, changing nothing, when the file cannot be written.
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
