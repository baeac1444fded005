"""The choice of replies for SFT by their loss: mean negative log-likelihoods under the policy that the stage starts
from. The highest ones are set aside, because replies with wrong labels are among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson

from flywheel.records.coreset import in_order, once_each
from flywheel.records.round import SELECTION_FILE, SamplePool
from flywheel.records.selection import select
from flywheel.records.similarity import lexical_diversity
from flywheel.system.files import json_line, write_atomic

SET_ASIDE: Final = 0.01
"""The share of replies that are set aside."""
BY_LOSS: Final = 0.6
"""The share of a hybrid choice that is chosen by loss; the rest is by diversity."""


def by_loss(
    pool: SamplePool, losses: Mapping[str, float], texts: Mapping[str, str], tokens: Mapping[str, int], seed: int
) -> list[dict[str, Any]]:
    """The lines of `selection.jsonl`, the highest loss first: by the losses (nats a token), texts and trained tokens
    of replies by task id."""
    ids = sorted(losses, key=lambda task: (-losses[task], task))
    aside = set(ids[: math.ceil(SET_ASIDE * len(ids))])
    names = {pool.candidates[task].task: task for task in ids}
    said = {number: texts[task] for number, task in names.items()}
    order = once_each([pool.candidates[task] for task in ids if task not in aside], said)
    size = pool.size if pool.strategy == "loss_topk" else round(BY_LOSS * pool.size)
    highest = select(order, replace(pool.rules, most=size, size=size)).tasks
    chosen = dict.fromkeys(highest, "chosen by loss")
    if pool.strategy == "hybrid":
        order.sort(key=lambda each: each.task not in chosen)
        order = in_order(order, said, "diversity", pool.size, seed, begin=len(highest))
        both = select(order, replace(pool.rules, most=pool.size, size=pool.size)).tasks
        chosen = {number: chosen.get(number, "chosen by diversity") for number in both}
    outcomes = {task: chosen.get(number, "released") for number, task in names.items()} | dict.fromkeys(
        aside, "set aside"
    )
    return [
        {"task_id": task, "loss": losses[task], "tokens": tokens[task], "outcome": outcomes[task]} for task in ids
    ]


def write_selection(directory: Path, lines: list[dict[str, Any]]) -> None:
    write_atomic(directory / SELECTION_FILE, b"".join(map(json_line, lines)))


def read_selection(directory: Path) -> list[dict[str, Any]]:
    """The lines of a round's file; none without one."""
    try:
        return [orjson.loads(line) for line in (directory / SELECTION_FILE).read_bytes().splitlines()]
    except FileNotFoundError:
        return []


def why_set_aside(line: Mapping[str, Any]) -> str:
    return f"set aside: its loss of {line['loss']:.2f} nats a token is among the highest: often a wrong label"


def losses_in(directories: Iterable[Path]) -> dict[str, float]:
    """The losses that rounds have measured, by task id; of several, that of the last directory."""
    return {line["task_id"]: line["loss"] for each in directories for line in read_selection(each)}


def metrics_of(line: Mapping[str, Any], loss: float | None) -> dict[str, Any]:
    """Figures of the reply in a task line. `tokens` are those that its model wrote, None if they are not recorded."""
    return {
        "task_id": line["task_id"],
        "tokens": line["metadata"]["output_tokens"] or None,
        "lexical_diversity": lexical_diversity(line["answer"]),
        "loss": loss,
    }
