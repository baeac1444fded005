"""The adapters that a round loads into its engines, each under a number that is used once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from flywheel.records.round import AdapterRef
from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.policy import AdapterFiles


class EngineAdapters:
    """Those of one round. Its methods raise as `ray_cluster.everywhere`."""

    def __init__(self, engines: list[Any]) -> None:
        self._engines = engines
        self._numbers = itertools.count(1)

    def load(self, name: str, files: AdapterFiles) -> LoadedAdapter:
        """Load an adapter on every engine."""
        number = next(self._numbers)
        return ray_cluster.load(self._engines, f"{name}-{number}", number, files)

    def load_saved(self, adapter: AdapterRef | None) -> LoadedAdapter | None:
        """The same from its folder. None is the base model, which needs no loading."""
        return None if adapter is None else self.load(adapter.name, AdapterFiles.read(Path(adapter.path)))

    def unload(self, adapter: LoadedAdapter) -> None:
        ray_cluster.everywhere(self._engines, lambda engine: engine.unload.remote(adapter))
