"""The stages of a round: which tasks each trains on, and what they ended with.

A stage has ended when `trained.json` is in its folder. A worker that is started again goes on with the first stage
without it.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from flywheel.config.file import Config
from flywheel.config.training import PlannedStage, TrainingSettings
from flywheel.records.round import (
    ADAPTER_DIR,
    LONGEST_SYSTEM_PROMPT,
    AdapterRef,
    RoundSpec,
    RoundTask,
    Sampling,
    StageResult,
    SystemPrompt,
)
from flywheel.system.files import tree_sha256, write_atomic
from flywheel.training.data.loss_selection import read_selection, why_set_aside
from flywheel.training.data.rollout import RolloutBatch, add_usage

log = logging.getLogger("flywheel.training.worker")

MOST_SYSTEM_PROMPTS: Final = 10
STAGES_DIR: Final = "stages"
TRAINED_FILE: Final = "trained.json"
"""In the folder of a stage that has ended: what it and those before it ended with."""


@dataclass(slots=True)
class Training:
    """What the stages of a round ended with so far, from which its result is made. `adapter` is that of the last one
    that trained; with `refusal` none has."""

    adapter: AdapterRef | None
    refusal: str = ""
    stages: list[StageResult] = field(default_factory=list)
    steps: int = 0
    rollout_steps: int = 0
    prompts_per_step: int = 0
    group_size: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    usage: dict[str, int] = field(default_factory=dict)
    system_prompts: Counter[str] = field(default_factory=Counter)
    with_gradient: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    """These three are as in `RoundResult`: by the stages, which have rendered the replies."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    partly: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why there is no adapter, or why stages that can end early, those of GRPO, did so."""
        ended = [each.reason for each in self.stages if each.outcome == "trained" and each.reason]
        return self.refusal or "; ".join(ended)

    def count(self, batch: RolloutBatch) -> None:
        """Count what the rollouts of a step took."""
        self.usage = add_usage(self.usage, batch.usage())
        self.system_prompts.update(batch.system_prompts)

    def rolled_out(self, settings: TrainingSettings, steps: int, first: float | None, last: float | None) -> None:
        """A stage with these settings has had rollouts for so many steps, with these mean rewards. Of several stages,
        the first one has the first reward, and the last one that has any the last."""
        self.steps += steps
        self.rollout_steps += steps
        self.prompts_per_step, self.group_size = settings.prompts_per_step, settings.group_size
        self.reward_first = first if self.reward_first is None else self.reward_first
        self.reward_last = self.reward_last if last is None else last

    def end_stage(self, stage: str, tasks: int, steps: int, reason: str, adapter: AdapterRef | None) -> None:
        """The stage of this name, on so many tasks, has ended after so many steps, with an adapter or without."""
        outcome: Literal["trained", "skipped"] = "trained" if adapter is not None else "skipped"
        if reason:
            log.warning("stage %s %s: %s", stage, "is skipped" if adapter is None else "ended early", reason)
        self.stages.append(StageResult(stage=stage, outcome=outcome, reason=reason, steps=steps, tasks=tasks))
        self.adapter = adapter or self.adapter

    def write(self, folder: Path) -> None:
        """Note in its folder that a stage has ended, and what it and those before it ended with."""
        write_atomic(folder / TRAINED_FILE, _TRAINING.dump_json(self))

    def figures(self, spec: RoundSpec, settings: Config, directory: Path) -> dict[str, Any]:
        """The fields of the result of a round whose stages have ended. What was set aside is noted."""
        lines = read_selection(directory) if spec.pool is not None else []
        released = [line["task_id"] for line in lines if line["outcome"] == "released"]
        self.left_out |= {line["task_id"]: why_set_aside(line) for line in lines if line["outcome"] == "set aside"}
        others = self.with_gradient | set(released)
        return {
            "stages": self.stages,
            "partly": self.partly,
            "reason": self.reason,
            "steps": sum(each.steps for each in self.stages),
            "sampling": self.sampling(settings) if self.rollout_steps else None,
            "released": released,
            "without_gradient": [
                *(task.task_id for task in spec.train if task.task_id not in others),
                *spec.left_out,
            ],
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
        }

    def sampling(self, settings: Config) -> Sampling:
        """How the rollouts were sampled."""
        found = self.system_prompts
        most = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:MOST_SYSTEM_PROMPTS]
        return Sampling(
            temperature=settings.rollout.temperature,
            steps=self.rollout_steps,
            prompts=settings.rollout.prompts_asked(self.prompts_per_step),
            group_size=self.group_size,
            system_prompts=[
                SystemPrompt(text=text[:LONGEST_SYSTEM_PROMPT], rollouts=rollouts) for text, rollouts in most
            ],
            further_system_prompts=len(found) - len(most),
        )


_TRAINING: Final = TypeAdapter(Training)


def ended_stages(parent: AdapterRef | None, stages: Sequence[PlannedStage], directory: Path) -> Training:
    """What the first stages ended with, as far as they have ended before."""
    ended = Training(parent)
    for stage in stages:
        try:
            folder = stage_adapter(directory, stage).parent
            found = _TRAINING.validate_json((folder / TRAINED_FILE).read_bytes())
        except (OSError, ValidationError):
            break
        if found.adapter is not None and tree_sha256(Path(found.adapter.path)) != found.adapter.sha256:
            break
        ended = found
    return ended


def stage_adapter(directory: Path, stage: PlannedStage) -> Path:
    """The folder of a stage's adapter, beside which `TRAINED_FILE` appears when the stage has ended."""
    return directory / STAGES_DIR / f"{stage.number}-{stage.kind}" / ADAPTER_DIR


def adapter_of(name: str, path: Path) -> AdapterRef:
    return AdapterRef(name=name, path=str(path), sha256=tree_sha256(path))


def tasks_by_stage(tasks: Sequence[RoundTask], stages: Sequence[PlannedStage], seed: int) -> list[list[RoundTask]]:
    """The tasks that each stage trains on. Tasks of one conversation are in one stage: on prompts that were just
    taught, all rollouts are right, and GRPO has nothing to compare.

    SFT gets the replies of teachers, and the other stages the rest. Without both kinds, the conversations are divided
    in equal parts. Stages of SFT get no task without a reply to imitate, and one with `samples` no further
    conversation once it has so many tasks. The order of the conversations depends on `seed`.
    """
    if len(stages) == 1 and stages[0].samples is None:
        return [[task for task in tasks if task.reply or stages[0].kind != "sft"]]
    conversations = defaultdict[str, list[RoundTask]](list)
    for task in tasks:
        conversations[task.conversation or task.task_id].append(task)
    names = sorted(conversations)
    random.Random(seed).shuffle(names)
    taught = [name for name in names if any(task.is_of_teacher for task in conversations[name])]
    places = range(len(stages))
    imitating = [place for place in places if stages[place].kind == "sft"]
    others = [place for place in places if place not in imitating]
    is_divided = imitating and others and 0 < len(taught) < len(names)
    parts: list[list[RoundTask]] = [[] for _ in stages]
    for some, takers in ((taught, imitating), (names, others)) if is_divided else ((names, places),):
        turns = cycle(takers)
        for name in some:
            for place in islice(turns, len(takers)):
                stage, part = stages[place], parts[place]
                room = stage.samples and stage.samples - len(part)
                if own := [task for task in conversations[name] if task.reply or stage.kind != "sft"][:room]:
                    part += own
                    # What a stage has no room for is left out: a conversation is in one stage.
                    conversations[name] = []
                    break
    return parts


def why_unused(task: RoundTask, stages: Sequence[PlannedStage]) -> str:
    """Why a task of the round is in none of its stages."""
    if not task.reply and all(stage.kind == "sft" for stage in stages):
        return "it has no reply to train on"
    return "the stages have as many tasks as their samples (training.stages)"
