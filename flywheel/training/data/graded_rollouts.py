"""Graded rollouts that a worker finds when it is started again, so that neither engine nor judge do their work twice.

`rollouts.jsonl` has those of complete steps, and `partial.jsonl` those of the unfinished step or comparison, each
appended as soon as it is graded.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flywheel.errors import StoreError, TrainError
from flywheel.records.program_run import RunResult
from flywheel.records.round import ROLLOUT_INDEX_FILE, ROLLOUTS_FILE
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.system.files import PRIVATE, cut_torn_line, json_line, write_atomic
from flywheel.training.data.groups import Scale
from flywheel.training.data.rollout import (
    AnsweredCall,
    CallOutcome,
    Completion,
    RewardWeights,
    Rollout,
    RolloutBatch,
    RolloutRequest,
)
from flywheel.training.data.rollout_file import (
    IndexedGroup,
    append_rollouts,
    groups,
    index_line,
    read_rollouts,
    rollout_line,
    rollout_of,
)
from flywheel.training.data.samples import Sample

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
    """The complete steps of a stage in `rollouts.jsonl`, counted from 0."""

    def __init__(self, directory: Path, before: int = 0) -> None:
        """Earlier stages took so many steps `before`. An incomplete step at the end of the file, which a worker was
        writing when it died, is removed."""
        self._directory, self._before = directory, before
        self._groups: dict[int, list[IndexedGroup]] = {}
        complete: list[IndexedGroup] = []
        found: list[IndexedGroup] = []
        with contextlib.suppress(StoreError):
            for group in groups(directory):
                found.append(group)
                if group.is_last:
                    complete += found
                    found = []
        for group in complete:
            self._groups.setdefault(group.step - before - 1, []).append(group)
        _shorten(directory / ROLLOUTS_FILE, complete[-1].end if complete else 0)
        _shorten(directory / ROLLOUT_INDEX_FILE, sum(len(index_line(group)) for group in complete))

    def __len__(self) -> int:
        return sum(step >= 0 for step in self._groups)

    def __contains__(self, step: int) -> bool:
        return step in self._groups

    def lines(self, step: int) -> dict[tuple[int, int], dict[str, Any]]:
        """The lines of a step by group and seed. Raises StoreError."""
        found = [
            rollout_of(self._directory, group, place)
            for group in self._groups[step]
            for place in range(len(group.rollouts))
        ]
        return {(line["group"], line["seed"]): line for line in found}

    def append(self, step: int, batch: RolloutBatch, scale_rewards: Scale, *, is_usable: bool = True) -> None:
        """Append the rollouts of a step, which are on the disk before they are trained on. A further worker removes
        them unless they are usable."""
        append_rollouts(self._directory, self._before + step + 1, batch, scale_rewards, is_complete=is_usable)


def _shorten(path: Path, size: int) -> None:
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


def restored_batch(
    lines: Mapping[tuple[int, int], Mapping[str, Any]], requests: list[RolloutRequest], weights: RewardWeights
) -> RolloutBatch:
    """The rollouts of requests from lines by group and seed. Raises TrainError if one is not among them."""
    try:
        return RolloutBatch(
            tuple(restored(lines[request.group, request.seed], request, weights) for request in requests)
        )
    except KeyError:
        raise TrainError(
            "go on with the rollouts of an earlier worker",
            f"{ROLLOUTS_FILE} has other rollouts than this round would make",
            f"Remove {ROLLOUTS_FILE} and {ROLLOUT_INDEX_FILE} from the round's directory: it then starts over.",
        ) from None


def restored(line: Mapping[str, Any], request: RolloutRequest, weights: RewardWeights) -> Rollout:
    """The rollout of a line (`rollout_line`), equal to the one that was written as far as training and figures use
    it: without ids and results of calls, which are in its steps."""
    verdict, run = line["verdict"], line.get("program")
    completion = Completion(
        text=line["answer"],
        samples=tuple(
            Sample(tuple(each["token_ids"]), tuple(map(bool, each["loss_mask"])), tuple(each["logprobs"]))
            for each in line["samples"]
        ),
        texts=tuple(tuple(each["text"]) for each in line["samples"]),
        steps=tuple(line["steps"]),
        calls=tuple(
            AnsweredCall("", each["name"], CallOutcome(each["outcome"]), repeats_trace=each["repeats_trace"])
            for each in line["calls"]
        ),
        missed=line["missed"],
        turns=line["turns"],
        forks=line["forks"],
        truncated=line["truncated"],
        loop=line.get("loop", ""),
        error="" if verdict is not None else line["error"],
        run=None if run is None else RunResult(run["reward"], metrics=run["metrics"], seconds=run["seconds"]),
        cause=(run and run["failure"]) or "",
        system_prompts=tuple(line["system_prompts"]),
    )
    if verdict is None:
        return Rollout(request, completion, None, weights)
    results = tuple(CriterionResult(**each) for each in line["criteria"])
    judged = Verdict(results=results, **{**verdict, "outcome": Outcome(verdict["outcome"])})
    return Rollout(request, completion, judged, weights)
