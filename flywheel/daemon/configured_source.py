"""Which source of the configuration a stored path belongs to, and whose replies are trained on because of that."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flywheel.config import Config, JsonlSource, OtlpSource, SourceSettings
from flywheel.exclusion import TrainedModels
from flywheel.store import samples
from flywheel.store.database import Store


def source_of(config: Config, path: Path) -> SourceSettings | None:
    """The source whose database, inbox or file this is, or in whose directory it lies; None if none is."""
    for source in config.sources:
        if isinstance(source, OtlpSource):
            # Not above: whoever receives nothing need not wait for a web server.
            from flywheel.sources.otlp.inbox import inbox_path

            name = inbox_path(config.state_dir, source.listen)
        else:
            name = source.path.absolute()
        if path == name or (isinstance(source, JsonlSource) and path.parent == name):
            return source
    return None


async def apply_model_rules(store: Store, config: Config) -> None:
    """Let `sources[].models`, `model.alias` and `model.base` hold for what was read before they were changed."""
    told = [source.model_dump_json() for source in config.sources]
    digest = hashlib.sha256("\n".join((config.model.alias, config.model.base, *told)).encode()).hexdigest()
    if await store.read(samples.applied_model_rules) == digest:
        return

    def models_of(path: str) -> TrainedModels:
        return config.models_of(source_of(config, Path(path)))

    after: int | None = 0
    while after is not None:
        after = await store.write(samples.apply_model_rules, models_of, after)
    await store.write(samples.note_model_rules, digest)
