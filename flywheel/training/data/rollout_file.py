"""Stored rollouts of a round: `rollouts.jsonl` with its index, `evaluation.jsonl` with the gate's answers.

With the index, a list of the groups and a single group are read without the tokens of all others. What the index
lacks (a step that is being written, or all if it was deleted) is read from the rollouts themselves.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.errors import StoreError
from flywheel.records.round import ANSWERS_FILE, EVALUATION_FILE, ROLLOUT_INDEX_FILE, ROLLOUTS_FILE, SPEC_FILE
from flywheel.records.verdict import Verdict
from flywheel.system.files import PRIVATE, append_jsonl, append_lines, json_line, write_atomic
from flywheel.training.data.groups import Drop, Scale
from flywheel.training.data.rollout import Completion, LoadedAdapter, Rollout, RolloutBatch
from flywheel.training.data.samples import Sample

MOST_SCANNED: Final = 2
"""How many files without a whole index are remembered."""


@dataclass(frozen=True, slots=True)
class IndexedRollout:
    """What is known of a rollout without reading its line, which has `size` bytes. `failed` are the criteria that
    were not met."""

    size: int
    reward: float | None
    advantage: float | None
    truncated: bool
    missed: bool
    failed: tuple[str, ...]

    @classmethod
    def of(cls, rollout: Mapping[str, Any], size: int) -> IndexedRollout:
        failed = tuple(each["criterion"] for each in rollout["criteria"] if not each["passed"])
        known = {name: rollout[name] for name in ("reward", "advantage", "truncated", "missed")}
        return cls(size, **known, failed=failed)


@dataclass(frozen=True)
class IndexedGroup:
    """The rollouts of one prompt in one step, whose lines follow each other from the byte `at`. With the last one
    of a step, the step was written whole."""

    at: int
    step: int
    group: int
    task_id: str
    dropped: str | None
    rollouts: tuple[IndexedRollout, ...]
    is_last: bool = field(default=False, compare=False)

    @property
    def end(self) -> int:
        """The byte after the last line."""
        return self.at + sum(each.size for each in self.rollouts)

    @cached_property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.rollouts if each.reward is not None]

    @cached_property
    def mean(self) -> float | None:
        """The mean reward; None if there is no reward."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def spread(self) -> float | None:
        """The difference between the largest and the smallest reward."""
        return max(self.rewards) - min(self.rewards) if self.rewards else None


def append(directory: Path, rollouts: Sequence[Mapping[str, Any]], *, is_complete: bool = True) -> None:
    """Append the rollouts of a step to those of a round, and to the index. Those of a group follow each other.

    The rollouts come first: a process that dies in between leaves an index that lacks the last step.
    """
    path = directory / ROLLOUTS_FILE
    at = path.stat().st_size if path.exists() else 0
    lines = [json_line(rollout) for rollout in rollouts]
    append_lines(path, lines)
    entries = list(_grouped(zip(rollouts, map(len, lines), strict=True), at))
    entries[-1:] = [replace(group, is_last=is_complete) for group in entries[-1:]]
    append_lines(directory / ROLLOUT_INDEX_FILE, [index_line(group) for group in entries])


def write_index(directory: Path) -> None:
    """Write the index of all rollouts again. No step is marked as whole: a worker would start over."""
    lines = [index_line(group) for group in _grouped(_read(directory / ROLLOUTS_FILE, 0), 0)]
    write_atomic(directory / ROLLOUT_INDEX_FILE, b"".join(lines))


def groups(directory: Path) -> Iterator[IndexedGroup]:
    """The groups of a round in their order; none without rollouts. Raises StoreError."""
    path = directory / ROLLOUTS_FILE
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    end = 0
    for group in _indexed(directory / ROLLOUT_INDEX_FILE, size):
        if group.at != end:
            break
        end = group.end
        yield group
    if end < size:
        yield from _scans.groups(path, end)


def rollout_of(directory: Path, group: IndexedGroup, place: int) -> dict[str, Any]:
    """The rollout at a place of a group, counted from 0, as `read_rollouts` gives it. Raises StoreError."""
    path = directory / ROLLOUTS_FILE
    at = group.at + sum(each.size for each in group.rollouts[:place])
    try:
        with path.open("rb") as file:
            file.seek(at)
            line = file.read(group.rollouts[place].size)
    except OSError as error:
        raise _unreadable(path, error) from error
    found = parse_rollout(line, path, f"the line at byte {at}")
    if (found["step"], found["group"], found["task_id"]) != (group.step, group.group, group.task_id):
        raise StoreError(
            f"read {path}",
            f"the line at byte {at} is of another group than its index says",
            f"Something else has written to it; delete {ROLLOUT_INDEX_FILE} beside it.",
        )
    return found


def _indexed(path: Path, size: int) -> Iterator[IndexedGroup]:
    """The groups of the index up to the first that cannot be: the rollouts have only `size` bytes."""
    try:
        with path.open("rb") as file:
            for line in file:
                group = _group(line)
                if group is None or group.end > size:
                    return
                yield group
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from error


def index_line(group: IndexedGroup) -> bytes:
    """The line of a group in the index."""
    values = [
        [each.size, each.reward, each.advantage, int(each.truncated), int(each.missed), *each.failed]
        for each in group.rollouts
    ]
    return json_line({**asdict(group), "rollouts": values})


def _group(line: bytes) -> IndexedGroup | None:
    """The group of a line; None if it is incomplete."""
    try:
        found = orjson.loads(line)
        rollouts = tuple(
            IndexedRollout(size, reward, advantage, bool(truncated), bool(missed), tuple(failed))
            for size, reward, advantage, truncated, missed, *failed in found.pop("rollouts")
        )
        return IndexedGroup(**found, rollouts=rollouts)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _grouped(rollouts: Iterator[tuple[Mapping[str, Any], int]], at: int) -> Iterator[IndexedGroup]:
    """The groups of rollouts, which come with the lengths of their lines, of which the first begins at `at`."""
    known = (
        ((each["step"], each["group"], each["task_id"], each["dropped"]), IndexedRollout.of(each, size))
        for each, size in rollouts
    )
    for (step, number, task_id, dropped), members in groupby(known, lambda pair: pair[0]):
        group = IndexedGroup(at, step, number, task_id, dropped, tuple(rollout for _, rollout in members))
        at = group.end
        yield group


class _Scans:
    """Remembers the index lines of what was read from rollouts without an index, so that it is read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[Path, int, int], tuple[list[bytes], int]] = {}

    def groups(self, path: Path, start: int) -> Iterator[IndexedGroup]:
        """The groups from the byte `start`. The last one is read again, as a step may still be being written."""
        with self._lock:
            key = path, path.stat().st_ino, start
            lines, end = self._found.pop(key, ([], start))
            if end > path.stat().st_size:
                lines, end = [], start
            last = None
            for group in _grouped(_read(path, end), end):
                if last is not None:
                    lines.append(index_line(last))
                last = group
            self._found[key] = lines, last.at if last is not None else end
            while len(self._found) > MOST_SCANNED:
                del self._found[next(iter(self._found))]
            known = len(lines)
        for line in lines[:known]:
            if (found := _group(line)) is not None:
                yield found
        if last is not None:
            yield last


_scans: Final = _Scans()


def _read(path: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The rollouts from the byte `start`, with the lengths of their lines."""
    at = start
    try:
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                if line.endswith(b"\n"):
                    yield parse_rollout(line, path, f"the line at byte {at}"), len(line)
                    at += len(line)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"read {path}", error.strerror or str(error), "Run it as the user of the state.")


def read_answers(path: Path, tasks: Collection[str]) -> list[dict[str, Any]] | None:
    """The answers about these held-out tasks in their order, of those that were graded again the last grade; None
    without the file, which retention removes.

    Only lines about these tasks are parsed. The incomplete last line of a running round is left out. Raises
    StoreError.
    """
    wanted = [task.encode() for task in tasks]
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and any(task in line for task in wanted):
                    answer = _answer(line, path, number)
                    if answer["task_id"] in tasks and "suite" not in answer:
                        found[answer["task_id"], answer["side"], answer["seed"]] = answer
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"read {path}", error.strerror or str(error), "Run it as the user of the state.") from error
    return list(found.values())


def _answer(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(line)
        needed = {name: found[name] for name in ("task_id", "side", "seed", "answer", "reward")}
        return {"steps": [], "truncated": False, "criteria": [], "error": "", **found, **needed}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise StoreError(
            f"read {path}", f"line {number} is no answer", "Something else has written to it; delete the line."
        ) from None


_KEYS: Final = {"step", "group", "task_id", "reward", "missed", "dropped", "criteria", "samples"}

DROPPED: Final = {
    "misses": "too many of its rollouts ended at a call without a recorded result",
    "rewards": "fewer than 4 rollouts have a reward",
    "spread": "its rewards are equal",
    "surplus": "the step had enough groups without it",
}
"""Why a group is not trained on, by `flywheel.training.data.groups.Drop`."""
PROBABILITIES: Final = (0.9, 0.5, 0.1, 0.0)
"""The classes in which trained tokens are shown: the least probability that they were sampled with."""


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """The rollouts in their order. The incomplete last line of a running round is left out. Raises StoreError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield parse_rollout(line, path, f"line {number}")
    except OSError as error:
        raise StoreError(f"read {path}", error.strerror or str(error), "Run it as the user of the state.") from error


def prompts_of(directory: Path) -> dict[str, Mapping[str, Any]]:
    """The tasks of a round by id, with `query` and `prompt` (messages); empty when its specification has no tasks."""
    try:
        spec = orjson.loads((directory / SPEC_FILE).read_bytes())
        return {task["task_id"]: task for task in (*spec["train"], *spec["held_out"])}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return {}


def probability_class(logprob: float) -> int:
    """The class of a trained token, an index of `PROBABILITIES`."""
    return next(place for place, least in enumerate(PROBABILITIES) if math.exp(logprob) >= least)


def parse_rollout(line: bytes, path: Path, place: str) -> dict[str, Any]:
    """The rollout of a line; `place` says where it is in the file. Raises StoreError."""
    try:
        rollout = orjson.loads(line)
    except orjson.JSONDecodeError:
        rollout = None
    if not isinstance(rollout, dict) or not rollout.keys() >= _KEYS:
        raise StoreError(
            f"read {path}", f"{place} is no rollout", "Something else has written to it; delete the line."
        )
    return rollout


def append_rollouts(
    directory: Path, step: int, batch: RolloutBatch, scale_rewards: Scale, *, is_complete: bool = True
) -> None:
    """Append the rollouts of a step, which counts from 1. A further worker goes on with those of complete steps."""
    pairs, dropped = zip(batch.rollouts, batch.advantages(scale_rewards), strict=True), batch.dropped
    lines = [
        rollout_line(rollout, step, advantage, dropped.get(rollout.request.group)) for rollout, advantage in pairs
    ]
    append(directory, lines, is_complete=is_complete)


def append_answer(directory: Path, rollout: Rollout, candidate: LoadedAdapter | None) -> None:
    """Append an answer of the gate, which is the candidate's or else that of the deployed adapter. One about a
    suite's task names the suite."""
    task = rollout.request.prompt.task
    line = {
        "task_id": task.task_id,
        **({"suite": task.suite} if task.suite else {}),
        "side": "candidate" if rollout.request.adapter == candidate else "deployed",
        "seed": rollout.request.seed,
        **_graded(rollout),
    }
    append_jsonl(directory / EVALUATION_FILE, [line])


def write_answers(directory: Path, rollouts: Sequence[Rollout]) -> None:
    """Write the answers of an evaluation in the order of their tasks, with failed and undecided ones."""
    lines = [json_line(rollout_line(rollout, 0, None)) for rollout in rollouts]
    write_atomic(directory / ANSWERS_FILE, b"".join(lines), mode=PRIVATE)


def rollout_line(rollout: Rollout, step: int, advantage: float | None, dropped: Drop | None = None) -> dict[str, Any]:
    """The line of a rollout, whose group was perhaps `dropped`."""
    return {
        "step": step,
        "task_id": rollout.request.prompt.task.task_id,
        "group": rollout.request.group,
        "seed": rollout.request.seed,
        **_graded(rollout),
        "missed": rollout.completion.missed,
        "advantage": advantage,
        "dropped": dropped,
        "turns": rollout.completion.turns,
        "forks": rollout.completion.forks,
        "calls": [
            {"name": call.name, "outcome": call.outcome, "repeats_trace": call.repeats_trace}
            for call in rollout.completion.calls
        ],
        "system_prompts": list(rollout.completion.system_prompts),
        "verdict": _verdict(rollout.verdict),
        "samples": [
            _sample(sample, texts)
            for sample, texts in zip(rollout.completion.samples, rollout.completion.texts, strict=True)
        ],
    }


def _graded(rollout: Rollout) -> dict[str, Any]:
    """What was judged, and the result. `steps` are messages between question and answer in the OpenAI chat format."""
    return {
        "steps": list(rollout.completion.steps),
        "answer": rollout.completion.text,
        "truncated": rollout.completion.truncated,
        "loop": rollout.completion.loop,
        "reward": rollout.reward,
        "criteria": [
            {
                "criterion": result.criterion,
                "choice": result.choice,
                "value": result.value,
                "passed": result.passed,
                "reason": result.reason,
            }
            for result in (rollout.verdict.results if rollout.verdict else ())
        ],
        "error": rollout.failure,
        **_run(rollout.completion),
    }


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    """What a verdict has beside its criteria; null if the judge was not asked."""
    names = ("outcome", "score", "error", "calls", "prompt_tokens", "completion_tokens")
    return None if verdict is None else {name: getattr(verdict, name) for name in names}


def _run(completion: Completion) -> dict[str, Any]:
    """What a run of the user's agent returned."""
    run = completion.run
    if run is None:
        return {}
    program = {"reward": run.reward, "metrics": dict(run.metrics), "seconds": round(run.seconds, 3)}
    return {"program": {**program, "failure": completion.cause or None}}


def _sample(sample: Sample, texts: Sequence[str | None]) -> dict[str, Any]:
    """Prompt and completion by token, in lists of one length. Only tokens with a loss mask of 1 are trained on; a
    logprob that is missing or no number is null. `text` is null where the engine returned no text."""
    return {
        "token_ids": list(sample.token_ids),
        "loss_mask": [int(own) for own in sample.loss_mask],
        "logprobs": [None if value is None or not math.isfinite(value) else value for value in sample.logprobs],
        "text": list(texts),
    }
