"""The stages of a round: which tasks each trains on, and where its adapter is kept until the round ends."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Final

from flywheel.config.training import Stage
from flywheel.records.round import ADAPTER_DIR, AdapterRef, RoundTask
from flywheel.system.files import tree_sha256

STAGES_DIR: Final = "stages"
TRAINED_FILE: Final = "trained.json"
"""In the folder of a stage that has ended: what it and those before it ended with."""


def stage_adapter(directory: Path, number: int, stage: Stage) -> Path:
    """The folder of a stage's adapter, beside which `TRAINED_FILE` appears when the stage has ended. `number` counts
    from 1."""
    return directory / STAGES_DIR / f"{number}-{stage}" / ADAPTER_DIR


def adapter_of(name: str, path: Path) -> AdapterRef:
    return AdapterRef(name=name, path=str(path), sha256=tree_sha256(path))


def tasks_by_stage(tasks: Sequence[RoundTask], stages: Sequence[Stage], seed: int) -> dict[Stage, list[RoundTask]]:
    """The tasks that each stage trains on. Tasks of one conversation are in one stage: on prompts that were just
    taught, all rollouts are right, and GRPO has nothing to compare.

    SFT gets the replies of teachers, and the other stages the rest. Without both kinds, the conversations are divided
    in equal parts, in an order that depends on `seed`; those without a reply to imitate are not for SFT.
    """
    if len(stages) == 1:
        return {stages[0]: [task for task in tasks if task.reply or stages[0] != "sft"]}
    conversations = defaultdict[str, list[RoundTask]](list)
    for task in tasks:
        conversations[task.conversation or task.task_id].append(task)
    names = sorted(conversations)
    random.Random(seed).shuffle(names)
    taught = [name for name in names if any(task.is_of_teacher for task in conversations[name])]
    parts: dict[Stage, list[RoundTask]] = {stage: [] for stage in stages}
    others: list[Stage] = [stage for stage in stages if stage != "sft"]
    if "sft" in stages and 0 < len(taught) < len(names):
        parts["sft"] = [task for name in taught for task in conversations[name] if task.reply]
        names, stages = [name for name in names if name not in set(taught)], others
    turns = cycle(stages)
    for name in names:
        own = conversations[name]
        stage = next(turns)
        if stage == "sft" and not any(task.reply for task in own):
            stage = next(turns)
        parts[stage] += [task for task in own if task.reply] if stage == "sft" else own
    return parts
