"""Graded rollouts that a worker finds when it is started again, so that neither engine nor judge do their work twice.

Those of a complete step are in its file (`rollout_file`), and those of unfinished steps or of a comparison in
`partial.jsonl`, each appended as soon as it is graded.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flywheel.errors import TrainError
from flywheel.records.round import ROLLOUTS_DIR
from flywheel.system.files import PRIVATE, cut_torn_line, json_line, remove_temporary, write_atomic
from flywheel.training.data.groups import Scale
from flywheel.training.data.rollout import RewardWeights, Rollout, RolloutBatch, RolloutRequest
from flywheel.training.data.rollout_file import (
    read_rollouts,
    read_summary,
    restored,
    rollout_line,
    step_file,
    step_files,
    write_step,
)

PARTIAL_FILE: Final = "partial.jsonl"

Key = tuple[str, str, int]
"""Hash of the adapter's weights, task and seed."""


class GradedRollouts:
    """Those of `partial.jsonl`. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / PARTIAL_FILE
        self._lock = threading.Lock()
        cut_torn_line(self._path)
        self._known = self._read()

    def find(self, request: RolloutRequest, weights: RewardWeights) -> Rollout | None:
        """The rollout of such a request, if an earlier worker has graded it."""
        line = self._known.get(_key(request))
        return None if line is None else restored(line, request, weights)

    def add(self, rollout: Rollout) -> None:
        """Store a rollout. One that is undecided or failed is not: the next worker tries it again."""
        if rollout.reward is None and not rollout.completion.missed:
            return
        line = json_line({"weights": _key(rollout.request)[0], **rollout_line(rollout, 0, None)})
        # Without fsync: what a power failure takes costs a call of the judge, and the disk must not slow rollouts.
        with self._lock, open(self._path, "ab", opener=lambda path, flags: os.open(path, flags, PRIVATE)) as file:
            file.write(line)

    def remove(self, batch: RolloutBatch) -> None:
        """Remove those of a step, once it is stored elsewhere."""
        stored = {_key(rollout.request) for rollout in batch.rollouts}
        with self._lock:
            kept = {key: line for key, line in self._read().items() if key not in stored}
            self._known = {key: line for key, line in self._known.items() if key not in stored}
            if kept:
                write_atomic(self._path, b"".join(map(json_line, kept.values())), mode=PRIVATE)
            else:
                self._path.unlink(missing_ok=True)

    def _read(self) -> dict[Key, dict[str, Any]]:
        lines = read_rollouts(self._path) if self._path.exists() else ()
        return {(line["weights"], line["task_id"], line["seed"]): line for line in lines}


def _key(request: RolloutRequest) -> Key:
    adapter = request.adapter
    return adapter.weights if adapter is not None else "", request.prompt.task.task_id, request.seed


class StoredSteps:
    """The complete steps of a stage, counted from 0: those that a further worker goes on with."""

    def __init__(self, directory: Path, before: int = 0) -> None:
        """Earlier stages took so many steps `before`. Files behind the last usable step are removed: those that no
        usable one follows, those behind a step without a file, which were made with weights that further workers do
        not have, and what a worker left that was killed while it wrote one. Raises StoreError."""
        self._directory, self._before, self._complete = directory, before, 0
        for step in itertools.count():
            if not (path := self._path(step)).exists():
                break
            if read_summary(path)[0].is_usable:
                self._complete = step + 1
        for path in step_files(directory):
            if int(path.stem) > before + self._complete:
                path.unlink()
        if (folder := directory / ROLLOUTS_DIR).is_dir():
            remove_temporary(folder)

    def _path(self, step: int) -> Path:
        return step_file(self._directory, self._before + step + 1)

    def __len__(self) -> int:
        return self._complete

    def __contains__(self, step: int) -> bool:
        return step < self._complete

    def lines(self, step: int) -> dict[tuple[int, int], dict[str, Any]]:
        """The lines of a step by group and seed. Raises StoreError."""
        return {(line["group"], line["seed"]): line for line in read_rollouts(self._path(step))}

    def append(self, step: int, batch: RolloutBatch, scale_rewards: Scale, *, is_usable: bool = True) -> None:
        """Write the rollouts of a step, which are on the disk before they are trained on. A further worker does not
        go on with them unless they are usable."""
        pairs, dropped = zip(batch.rollouts, batch.advantages(scale_rewards), strict=True), batch.dropped
        number = self._before + step + 1
        lines = [
            rollout_line(rollout, number, advantage, dropped.get(rollout.request.group))
            for rollout, advantage in pairs
        ]
        write_step(self._path(step), lines, is_usable=is_usable)


def restored_batch(
    lines: Mapping[tuple[int, int], Mapping[str, Any]], requests: list[RolloutRequest], weights: RewardWeights
) -> RolloutBatch:
    """The rollouts of requests from lines by group and seed. Raises TrainError if one is not among them."""
    try:
        return RolloutBatch(
            tuple(restored(lines[request.group, request.seed], request, weights) for request in requests)
        )
    except (KeyError, ValueError):  # ValueError: of pydantic.
        raise TrainError(
            "go on with the rollouts of an earlier worker",
            f"{ROLLOUTS_DIR}/ has other rollouts than this round would make",
            "Remove identity.json from the round's directory: all of its rollouts are then made and judged again.",
        ) from None
