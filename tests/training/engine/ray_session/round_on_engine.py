"""A whole round on an engine that is there: only the trainer is started for it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import ray

from flywheel.cli.demo import judge
from flywheel.records.round import RoundResult, RoundTask
from flywheel.training.data.round_directory import settings_of
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import StartedEngine
from flywheel.training.optim.rollout_grading import build_grade
from flywheel.training.optim.trainer_actor import Trainer
from flywheel.training.worker.processes import Trainers
from flywheel.training.worker.round import Round
from tests.factories.worker import spec as round_spec

NUMBERS = itertools.count(1000, 10)


def run_round(
    engine: Any,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: list[RoundTask],
    held_out: list[RoundTask],
    **rollout: Any,
) -> RoundResult:
    """A round of two steps; `rollout` are its settings of this section."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with judge.running() as url:
        given = round_spec(url).settings
        given["training"] |= {"steps": 2, "prompts_per_step": 4, "group_size": 6}
        given["rollout"] |= {"max_model_len": 128, **rollout}
        given["gate"] |= {"max_tasks": 10, "samples": 1}
        spec = round_spec(url, train=train, held_out=held_out, settings=given)
        whole = Round(spec, directory, settings_of(spec), build_grade)
        # An engine gets a number once; this one has served other rounds.
        whole.adapters._numbers = itertools.count(next(NUMBERS))

        def start() -> None:
            whole.engines[:], whole.about = [engine], StartedEngine("cpu", 192)
            actor = ray_cluster.start(Trainer, spec, ray_cluster.cpu_threads(), gpus=0)
            ray_cluster.on_all([actor], "start")
            whole.trainers = Trainers([actor])

        monkeypatch.setattr(whole, "start", start)
        try:
            return whole.run()
        finally:
            for actor in whole.trainers.actors if whole.trainers is not None else ():
                ray.kill(actor)
