"""Stored rollouts of a round: a file per step in `rollouts/`, and `evaluation.jsonl` with the gate's answers.

The file of a step appears whole. Its first line has what lists of groups show, so that they read no tokens; each
other line is a rollout. A round of an earlier version has the rollouts of all steps in one file without such lines,
which is only read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Self

import orjson
from pydantic import TypeAdapter, ValidationError

from flywheel.errors import StoreError
from flywheel.records.round import ANSWERS_FILE, EVALUATION_FILE, OLD_ROLLOUTS_FILE, ROLLOUTS_DIR, SPEC_FILE
from flywheel.records.verdict import Verdict
from flywheel.system.files import PRIVATE, append_jsonl, json_line, make_private, sync, whole_file, write_atomic
from flywheel.training.data.groups import Drop
from flywheel.training.data.rollout import Completion, LoadedAdapter, RewardWeights, Rollout, RolloutRequest

REMEDY: Final = (
    "Something else has written to it. If you remove it, its rollouts are lost, and a round that is not over makes"
    " those of this step and of all behind it again."
)


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """What is known of a rollout without reading its line, which has `size` bytes. `failed` are the criteria that
    were not met."""

    size: int
    reward: float | None
    advantage: float | None
    truncated: bool
    missed: bool
    failed: tuple[str, ...]

    @classmethod
    def of(cls, rollout: Mapping[str, Any], size: int) -> Self:
        failed = tuple(each["criterion"] for each in rollout["criteria"] if not each["passed"])
        known = {name: rollout[name] for name in ("reward", "advantage", "truncated", "missed")}
        return cls(size, **known, failed=failed)


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one prompt in one step, whose lines follow each other in the file `path` from the byte `at`."""

    step: int
    group: int
    task_id: str
    dropped: str | None
    rollouts: tuple[RolloutSummary, ...]
    path: Path = field(default=Path(), compare=False)
    at: int = field(default=0, compare=False)

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


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The first line of a step's file. `is_usable`: whether a further worker may go on with its rollouts."""

    is_usable: bool
    groups: tuple[RolloutGroup, ...]


_SUMMARIES: Final = TypeAdapter(StepSummary)


def step_file(directory: Path, step: int) -> Path:
    """The file of a step, which counts from 1."""
    return directory / ROLLOUTS_DIR / f"{step:04}.jsonl"


def write_step(path: Path, rollouts: Iterable[Mapping[str, Any]], *, is_usable: bool = True) -> None:
    """Write the rollouts of a step, of which those of a group follow each other. When it returns, they are on the
    disk."""
    made = [(rollout, json_line(rollout)) for rollout in rollouts]
    groups = tuple(_grouped((rollout, len(line)) for rollout, line in made))
    place = {"groups": {"__all__": {"path", "at"}}}
    first = _SUMMARIES.dump_python(StepSummary(is_usable, groups), mode="json", exclude=place)
    make_private(path.parent)
    with whole_file(path, mode=PRIVATE) as file:
        file.writelines((json_line(first), *(line for _, line in made)))
    sync(path.parent.parent)


def read_summary(path: Path) -> tuple[StepSummary, int]:
    """What the first line of a step's file has, and the length of that line. Raises StoreError."""
    try:
        with path.open("rb") as file:
            line = file.readline()
        return _SUMMARIES.validate_json(line), len(line)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValidationError:
        raise StoreError(f"read {path}", "its first line is no summary of a step", REMEDY) from None


def step_files(directory: Path) -> list[Path]:
    """The files of the steps in their order."""
    found = (path for path in (directory / ROLLOUTS_DIR).glob("*.jsonl") if path.stem.isdecimal())
    return sorted(found, key=lambda path: int(path.stem))


def rollout_files(directory: Path) -> list[Path]:
    """The files with the rollouts of a round in their order; of an earlier version, one of all steps."""
    old = directory / OLD_ROLLOUTS_FILE
    return [old] if old.exists() else step_files(directory)


def groups(directory: Path) -> Iterator[RolloutGroup]:
    """The groups of a round in their order; none without rollouts. Raises StoreError."""
    for path in rollout_files(directory):
        if path.name == OLD_ROLLOUTS_FILE:
            found, at = _grouped(_sized(path)), 0
        else:
            summary, at = read_summary(path)
            found = iter(summary.groups)
        for group in found:
            yield replace(group, path=path, at=at)
            at += sum(each.size for each in group.rollouts)


def rollouts(directory: Path) -> Iterator[dict[str, Any]]:
    """The rollouts of a round in their order. Raises StoreError."""
    return (rollout for path in rollout_files(directory) for rollout in read_rollouts(path))


def rollout_of(group: RolloutGroup, place: int) -> dict[str, Any]:
    """The rollout at a place of a group, counted from 0. Raises StoreError."""
    at = group.at + sum(each.size for each in group.rollouts[:place])
    try:
        with group.path.open("rb") as file:
            file.seek(at)
            line = file.read(group.rollouts[place].size)
    except OSError as error:
        raise _unreadable(group.path, error) from error
    return _parsed(line, group.path, f"the line at byte {at}")


def _grouped(rollouts: Iterable[tuple[Mapping[str, Any], int]]) -> Iterator[RolloutGroup]:
    """The groups of rollouts, which come with the lengths of their lines."""
    names = ("step", "group", "task_id", "dropped")
    known = ((tuple(each[name] for name in names), RolloutSummary.of(each, size)) for each, size in rollouts)
    for (step, group, task_id, dropped), members in groupby(known, lambda pair: pair[0]):
        yield RolloutGroup(step, group, task_id, dropped, tuple(rollout for _, rollout in members))


def _sized(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The rollouts of a file with the lengths of their lines."""
    first = 2 if path.parent.name == ROLLOUTS_DIR and path.stem.isdecimal() else 1
    for number, line in _numbered(path):
        if number >= first:
            yield _parsed(line, path, f"line {number}"), len(line)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers from 1, without the incomplete last line of one that is appended to.
    Raises StoreError."""
    try:
        with path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.endswith(b"\n"))
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
    if not path.exists():
        return None
    wanted = [task.encode() for task in tasks]
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for number, line in _numbered(path):
        if any(task in line for task in wanted):
            answer = _answer(line, path, number)
            if answer["task_id"] in tasks and "suite" not in answer:
                found[answer["task_id"], answer["side"], answer["seed"]] = answer
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
    """The rollouts of a file, which is a step's or is appended to. Raises StoreError."""
    return (rollout for rollout, _ in _sized(path))


def prompts_of(directory: Path) -> dict[str, Mapping[str, Any]]:
    """The tasks of a round by id, with `query` and `prompt` (messages); empty when its specification has no tasks."""
    try:
        spec = orjson.loads((directory / SPEC_FILE).read_bytes())
        return {task["task_id"]: task for task in (*spec["train"], *spec["held_out"])}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return {}


def conversations(
    state_dir: Path, name: str, task: str | None = None, step: int | None = None, *, with_samples: bool = False
) -> Iterator[dict[str, Any]]:
    """The groups of a round (`r0007`, or `debug`), perhaps only of a task or a step, each with its prompt, as far as
    the round's specification still has it, and its rollouts; `with_samples`: with their tokens.

    Raises StoreError, also for a round that has none.
    """
    directory, attempted = state_dir / "rounds" / name, f"show rollouts of {name}"
    if not re.fullmatch(r"r\d+|debug", name) or not directory.is_dir():
        why = f"there is no such round in {state_dir}"
        raise StoreError(attempted, why, "`flywheel status` lists rounds; `debug` is the last debug round.")
    if not rollout_files(directory):
        hint = "A round writes them at the end of each step; retention.keep_days says when they are removed."
        raise StoreError(attempted, f"there is none in {directory}", hint)
    prompts = prompts_of(directory)
    unread = {"step", "task_id", "group", "dropped", *(() if with_samples else ("samples",))}
    for group in groups(directory):
        if task not in (None, group.task_id) or step not in (None, group.step):
            continue
        prompt = prompts.get(group.task_id, {})
        members = (rollout_of(group, place) for place in range(len(group.rollouts)))
        yield {
            "step": group.step,
            "task_id": group.task_id,
            "prompt": prompt.get("prompt", []),
            "question": prompt.get("query", ""),
            "dropped": group.dropped,
            "rollouts": [{key: item[key] for key in item if key not in unread} for item in members],
        }


def in_short(directory: Path) -> list[dict[str, Any]]:
    """Every rollout of a round, in short; empty without any. Raises StoreError."""
    if not rollout_files(directory):
        return []
    return [
        {
            **{key: group[key] for key in ("step", "task_id", "question")},
            **{key: rollout[key] for key in ("steps", "answer", "reward")},
            "failed": [item["criterion"] for item in rollout["criteria"] if not item["passed"]],
            "error": rollout["error"],
        }
        for group in conversations(directory.parents[1], directory.name)
        for rollout in group["rollouts"]
    ]


def probability_class(logprob: float) -> int:
    """The class of a trained token, an index of `PROBABILITIES`."""
    return next(place for place, least in enumerate(PROBABILITIES) if math.exp(logprob) >= least)


def _parsed(line: bytes, path: Path, place: str) -> dict[str, Any]:
    """The rollout of a line; `place` says where it is in the file. Raises StoreError."""
    try:
        rollout = orjson.loads(line)
    except orjson.JSONDecodeError:
        rollout = None
    if not isinstance(rollout, dict) or not rollout.keys() >= _KEYS:
        raise StoreError(f"read {path}", f"{place} is no rollout", REMEDY)
    return rollout


_COMPLETIONS: Final = TypeAdapter(Completion)
_VERDICTS: Final = TypeAdapter[Verdict | None](Verdict | None)
_OF_COMPLETION: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("text", "samples", "steps", "missed", "turns", "forks", "truncated", "loop"), True),
    "calls": {"__all__": {"call_id", "name", "outcome", "repeats_trace"}},
    "run": {"reward", "metrics", "seconds"},
    "system_prompts": True,
}
"""What is stored of a completion and of a verdict, in the forms of pydantic's `include`."""
_OF_VERDICT: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("outcome", "score", "error", "calls", "prompt_tokens", "completion_tokens"), True),
    "results": {"__all__": {"criterion", "choice", "value", "passed", "reason"}},
}
_OF_ANSWER: Final = ("steps", "answer", "truncated", "loop", "reward", "criteria", "error", "program")


def append_answer(directory: Path, rollout: Rollout, candidate: LoadedAdapter | None) -> None:
    """Append an answer of the gate, which is the candidate's or else that of the deployed adapter. One about a
    suite's task names the suite."""
    task, made = rollout.request.prompt.task, _stored(rollout)
    line: dict[str, Any] = {
        "task_id": task.task_id,
        **({"suite": task.suite} if task.suite else {}),
        "side": "candidate" if rollout.request.adapter == candidate else "deployed",
        "seed": rollout.request.seed,
        **{name: made[name] for name in _OF_ANSWER if name in made},
    }
    append_jsonl(directory / EVALUATION_FILE, [line])


def write_answers(directory: Path, rollouts: Sequence[Rollout]) -> None:
    """Write the answers of an evaluation in the order of their tasks, with failed and undecided ones."""
    lines = [json_line(rollout_line(rollout, 0, None)) for rollout in rollouts]
    write_atomic(directory / ANSWERS_FILE, b"".join(lines), mode=PRIVATE)


def rollout_line(rollout: Rollout, step: int, advantage: float | None, dropped: Drop | None = None) -> dict[str, Any]:
    """The line of a rollout, whose group was perhaps `dropped`."""
    request = rollout.request
    where = {"step": step, "task_id": request.prompt.task.task_id, "group": request.group, "seed": request.seed}
    return {**where, **_stored(rollout), "advantage": advantage, "dropped": dropped}


def _stored(rollout: Rollout) -> dict[str, Any]:
    """What was generated, what was judged, and the result.

    `steps` are messages between question and answer in the OpenAI chat format. The lists of a sample have one length;
    a logprob that is no number is null, and so is the `text` of a token where the engine returned none. `verdict` has
    what the judge said beside its criteria; null if it was not asked.
    """
    completion, failure = rollout.completion, rollout.completion.cause or None
    line: dict[str, Any] = _COMPLETIONS.dump_python(completion, mode="json", include=_OF_COMPLETION)
    verdict = _VERDICTS.dump_python(rollout.verdict, mode="json", include=_OF_VERDICT)
    for sample, texts in zip(line["samples"], completion.texts, strict=True):
        finite = [None if value is None or not math.isfinite(value) else value for value in sample["logprobs"]]
        sample |= {"loss_mask": list(map(int, sample["loss_mask"])), "logprobs": finite, "text": list(texts)}
    run = line.pop("run")
    return {
        "answer": line.pop("text"),
        **line,
        "reward": rollout.reward,
        "criteria": verdict.pop("results") if verdict else [],
        "error": rollout.failure,
        "verdict": verdict,
        **({"program": {**run, "failure": failure}} if run else {}),
    }


def restored(line: Mapping[str, Any], request: RolloutRequest, weights: RewardWeights) -> Rollout:
    """The rollout of a line (`rollout_line`), equal to the one that was written as far as training and figures use
    it: without the results of calls, which are in its steps."""
    verdict, run = line["verdict"], line.get("program")
    completion = {
        **line,
        "text": line["answer"],
        "texts": [sample["text"] for sample in line["samples"]],
        "error": line["error"] if verdict is None else "",
        "run": run,
        "cause": (run and run["failure"]) or "",
    }
    judged = verdict and {**verdict, "results": line["criteria"]}
    return Rollout(request, _COMPLETIONS.validate_python(completion), _VERDICTS.validate_python(judged), weights)
