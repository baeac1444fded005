"""Finds the configured source of a stored path, and applies changed `models` settings to stored tasks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from flywheel.config import Config, JsonlSource, SourceSettings, StudioSource
from flywheel.records.exclusion import TrainedModels
from flywheel.store import samples
from flywheel.store.kernel.database import Store, note, noted

MODEL_RULES: Final = "model_rules"
"""Key of the note with a digest of the `models` settings that all stored tasks were compared with."""


def source_of(config: Config, path: Path) -> SourceSettings | None:
    """The source with this database, inbox, file or directory of files; None if no configured source has it."""
    for source in config.sources:
        if isinstance(source, StudioSource | JsonlSource):
            own = source.path.absolute()
        else:
            # Imported here: `flywheel status` needs it only for such sources.
            from flywheel.sources.otlp.inbox import inbox_of

            own = inbox_of(source, config.state_dir)
        if path == own or (isinstance(source, JsonlSource) and path.parent == own):
            return source
    return None


async def apply_model_rules(store: Store, config: Config) -> None:
    """Update which stored tasks rounds leave out, and their targets, if `sources[].models`, `model.alias`,
    `model.base` or `targets` have changed."""
    settings = [config.model.alias, config.model.base, *(source.model_dump_json() for source in config.sources)]
    settings += [f"{name}: {each.model_dump_json()}" for name, each in config.targets.items()]
    digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()
    if await store.read(noted, MODEL_RULES) == digest:
        return

    def models_of(path: str) -> TrainedModels:
        return config.models_of(source_of(config, Path(path)))

    after: int | None = 0
    while after is not None:
        after = await store.write(samples.apply_model_rules, models_of, after, has_targets=bool(config.targets))
    await store.write(note, MODEL_RULES, digest)
