"""Finds the configured source of a stored path, and applies changed `models` settings to stored tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.ingest import JsonlSource, SourceSettings, StudioSource
from flywheel.records.exclusion import TrainedModels
from flywheel.store import samples
from flywheel.store.kernel.database import Store, note, noted

MODEL_RULES: Final = "model_rules"
"""Key of the note with a digest of the `models` settings that all stored tasks were compared with."""


def source_of(config: Config, path: Path) -> SourceSettings | None:
    """The source with this database, inbox, call log, file or directory of files; None if none is configured."""
    for source in config.sources:
        if isinstance(source, StudioSource | JsonlSource):
            own = source.path.absolute()
        else:
            # Imported here: `flywheel status` needs it only for such sources.
            from flywheel.sources.otlp.inbox import own_file

            own = own_file(source, config.state_dir)
        if path == own or (isinstance(source, JsonlSource) and path.parent == own):
            return source
    return None


async def apply_model_rules(store: Store, config: Config) -> None:
    """Update which stored tasks rounds leave out, and their targets, if `sources[].models`, `model.alias`,
    `model.base` or `targets` have changed."""
    digest = _digest(config)
    if await store.read(noted, MODEL_RULES) == digest:
        return
    models_of, has_targets = partial(_models_of, config), bool(config.targets)
    after: int | None = 0
    while after is not None:
        after = await store.write(samples.apply_model_rules, models_of, after, has_targets=has_targets)
    await store.write(note, MODEL_RULES, digest)


def changes_of_model_rules(conn: Connection, config: Config) -> Iterator[samples.RuleChange]:
    """What `apply_model_rules` would change; nothing is written."""
    if noted(conn, MODEL_RULES) == _digest(config):
        return
    models_of, has_targets = partial(_models_of, config), bool(config.targets)
    after: int | None = 0
    while after is not None:
        changes, after = samples.changes_by_rules(conn, models_of, after, has_targets=has_targets)
        yield from changes


def _digest(config: Config) -> str:
    """A digest of the settings that `models_of` depends on."""
    settings = [config.model.alias, config.model.base, *(source.model_dump_json() for source in config.sources)]
    settings += [f"{name}: {each.model_dump_json()}" for name, each in config.targets.items()]
    return hashlib.sha256("\n".join(settings).encode()).hexdigest()


def _models_of(config: Config, path: str) -> TrainedModels:
    return config.models_of(source_of(config, Path(path)))
