"""The user's agent of a round, which its engines run: its start, its trial, which of its rewards counts."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from flywheel.config.file import Config
from flywheel.config.training import RewardSettings
from flywheel.errors import TrainError
from flywheel.records.program_run import RunResult
from flywheel.records.round import FrozenTarget, RoundSpec
from flywheel.system.files import write_json
from flywheel.system.terminal import quantity
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.data.round_directory import REWARD_FILE
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.endpoint import listed, undecided
from flywheel.training.engine.rollout_engine import ProgramSetup
from flywheel.training.optim.round_steps import step_requests
from flywheel.training.program.program_pool import decided_reward, program_of
from flywheel.training.worker.processes import EngineAdapters

log = logging.getLogger("flywheel.training.worker")

TRIALS: Final = 3
"""Tasks on which the user's agent is tried before training."""


class UsersAgent:
    """Of a round, whose rollouts may also need none: then nothing happens."""

    def __init__(self, spec: RoundSpec, settings: Config, engines: list[Any], adapters: EngineAdapters) -> None:
        self.program = program_of(settings)
        self._spec, self._engines, self._adapters = spec, engines, adapters
        self._loaded: dict[str, LoadedAdapter | None] | None = None
        self._noted_models: set[str] = set()

    @property
    def files(self) -> list[str]:
        """Those that the nodes of engines need."""
        files = self.program.files if self.program is not None else ()
        return [path for path in files if Path(path).is_absolute()]

    @property
    def frozen(self) -> list[FrozenTarget]:
        """The targets that it may ask beside the one that is trained."""
        return self._spec.frozen if self.program is not None else []

    def use(self, settings: Config) -> None:
        """Start it on the engines, with the models of all targets."""
        if self.program is None:
            return
        if self._loaded is None:
            self._loaded = {each.alias: self._adapters.load_saved(each.adapter) for each in self.frozen}
        others = {each.target: each.alias for each in self.frozen}
        setup = ProgramSetup.of(settings, self._spec.target or settings.model.alias, others, self._loaded)
        dumped = settings.model_dump(mode="json")
        found, *_ = ray_cluster.everywhere(self._engines, lambda engine: engine.use_program.remote(dumped, setup))
        log.info("the agent of rollouts: %s", found)

    def note_models(self) -> dict[str, int]:
        """How often it has asked for each model so far. Logs new names, and warns once a round of each that the
        policy answers only because nothing says who does."""
        asked: Counter[str] = Counter()
        if self.program is not None:
            for found in ray_cluster.everywhere(self._engines, lambda engine: engine.asked_models.remote()):
                asked.update(found)
            new = {name: times for name, times in asked.items() if name not in self._noted_models}
            self._noted_models |= new.keys()
            if new:
                log.info("models that the agent asks for: %s", listed(new))
            if why := undecided(self.program, new):
                log.warning("%s", why)
        return dict(asked)

    def trial(self, prompts: Sequence[Prompt], settings: Config, directory: Path) -> tuple[Config, dict[str, Any]]:
        """Try it on some prompts. Returns the settings with the reward that counts for the whole round, and what
        `metrics.jsonl` says of it. Raises TrainError."""
        run = self.try_on(prompts, settings)
        models = self.note_models()
        decided, why = with_decided_reward(settings, run, directory)
        if decided is not settings:
            # From now on, a run without what counts is a failure.
            self.use(decided)
        return decided, {"models": models, **({"reward_by": why} if why else {})}

    def try_on(self, prompts: Sequence[Prompt], settings: Config) -> RunResult | None:
        """Run it on a task, and on two others if it fails. Returns what a whole run returned; None if each reached a
        limit. Raises TrainError if it fails on each."""
        of_groups = step_requests(prompts[:TRIALS], 0, self._spec, settings, None)
        requests = of_groups[:: settings.training.group_size]
        failures: list[Completion] = []
        is_cut = False
        for some in filter(None, (requests[:1], requests[1:])):
            made: list[Completion] = ray_cluster.anywhere(self._engines, partial(_generated, some))
            failures += (failed := [completion for completion in made if completion.error])
            is_cut |= len(failed) < len(made)
            for completion in made:
                run: RunResult | None = completion.run
                if run is not None and run.cause is None and not completion.error:
                    return run
        if is_cut:
            return None
        raise TrainError(
            f"run the agent of {self._spec.round_id} (rollout.agent)",
            f"it failed on {quantity(len(failures), 'task')} before training; the first: {failures[0].error}",
            "Correct it; `flywheel workflow check` runs it once. Its output is in the worker's log.",
            # The engine, and not the agent, may have failed.
            retryable=any(each.needs_reward for each in failures),
        )


def with_decided_reward(settings: Config, run: RunResult | None, directory: Path) -> tuple[Config, str]:
    """The settings with the reward that a first run decides for the whole round, unless they decide, and how it was
    decided."""
    rollout, path = settings.rollout, directory / REWARD_FILE
    if rollout.reward is not None:
        return settings, ""
    if not path.exists():
        # Not by a later worker: the stored rollouts have the rewards of this decision.
        decided, why = decided_reward(run) if run is not None else (None, "")
        write_json(path, {"reward": decided and decided.model_dump(), "reward_by": why})
    stored = json.loads(path.read_bytes())
    if stored["reward"] is None:
        return settings, ""
    reward, why = RewardSettings.model_validate(stored["reward"]), stored["reward_by"]
    if why:
        log.info("%s", why)
    return settings.model_copy(update={"rollout": rollout.model_copy(update={"reward": reward})}), why


def _generated(requests: Sequence[RolloutRequest], engine: Any) -> list[Completion]:
    return ray_cluster.wait([engine.generate.remote(request) for request in requests])
