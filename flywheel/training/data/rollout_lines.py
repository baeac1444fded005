"""What a round stores of its rollouts: `rollouts.jsonl` with an index, and `evaluation.jsonl` for the gate's answers.

`rollout_file`, `rollout_index` and `evaluation_file`, beside this module, read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flywheel.records.round import EVALUATION_FILE
from flywheel.system.files import append_jsonl
from flywheel.training.data import rollout_file
from flywheel.training.data.groups import Drop, Scale
from flywheel.training.data.rollout import Batch, Completion, LoadedAdapter, Rollout
from flywheel.training.data.samples import Sample


def append_rollouts(directory: Path, step: int, batch: Batch, scale_rewards: Scale) -> None:
    """Append the rollouts of a step, which counts from 1."""
    pairs, dropped = zip(batch.rollouts, batch.advantages(scale_rewards), strict=True), batch.dropped
    lines = [
        rollout_line(rollout, step, advantage, dropped.get(rollout.request.group)) for rollout, advantage in pairs
    ]
    rollout_file.append(directory, lines)


def append_answers(directory: Path, batch: Batch, candidate: LoadedAdapter | None) -> None:
    """Append the gate's answers of a batch, which are the candidate's or else those of the deployed adapter."""
    lines = [
        {
            "task_id": rollout.request.prompt.task.task_id,
            "side": "candidate" if rollout.request.adapter == candidate else "deployed",
            "seed": rollout.request.seed,
            **_graded(rollout),
        }
        for rollout in batch.rollouts
    ]
    append_jsonl(directory / EVALUATION_FILE, lines)


def rollout_line(rollout: Rollout, step: int, advantage: float | None, dropped: Drop | None = None) -> dict[str, Any]:
    """The line of a rollout, whose group was perhaps `dropped`."""
    return {
        "step": step,
        "task_id": rollout.request.prompt.task.task_id,
        "group": rollout.request.group,
        "seed": rollout.request.seed,
        **_graded(rollout),
        "missed": rollout.completion.missed,
        "advantage": _rounded(advantage),
        "dropped": dropped,
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
        "logprobs": [_rounded(value) for value in sample.logprobs],
        "text": list(texts),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
