"""The trainer: a Ray actor that trains the adapter of a round, stage by stage.

Each step of GRPO syncs the adapter to the engines under a new name, collects graded rollouts, takes one optimizer
step and writes one metrics line. SFT and DPO need no engine. The trainer starts no engine and knows no judge; a
factory for the grading function is passed in.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from flywheel.config import Config
from flywheel.records.round import AdapterRef, RoundSpec
from flywheel.system.process import keep_freed_memory
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch, add_usage
from flywheel.training.data.rollout_file import append_rollouts
from flywheel.training.data.round_directory import SYNC_DIR, TRL_DIR
from flywheel.training.data.round_progress import UPDATE_FIGURES, Meter, Metrics
from flywheel.training.data.samples import Pair, RecordedReply, TrainingRow
from flywheel.training.engine.policy import load_policy, save_adapter, trainer_dtypes
from flywheel.training.engine.ray_cluster import RoundActor
from flywheel.training.optim.collector import Collector, Grade
from flywheel.training.optim.epochs import Epochs, rows_of, stage_settings
from flywheel.training.optim.round_steps import (
    FIRST_LOOK,
    RoundRefusedError,
    RoundSteps,
    refuse_growing_misses,
    refuse_wide_gap,
    refuse_without_spread,
)


def import_trl() -> None:
    """Import TRL for this process, without vLLM.

    TRL imports vLLM where it is installed, which takes longer than all the rest, and needs it only to generate
    (`use_vllm`), which the trainer never does.
    """
    # As an attribute of `trl`, which loads its modules lazily, it would not be found.
    from trl import import_utils

    import_utils.is_vllm_available = lambda *_, **__: False
    import flywheel.training.optim.grpo  # noqa: F401


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training run. With `refusal` there is no adapter."""

    steps: int
    reward_first: float | None
    reward_last: float | None
    refusal: str = ""
    rollout_steps: int = 0
    """How many of the steps asked the policy for rollouts."""
    usage: dict[str, int] = field(default_factory=dict)
    system_prompts: Mapping[str, int] = field(default_factory=dict)
    """Number of rollouts of each."""
    with_gradient: frozenset[str] = frozenset()
    """Ids of the tasks that gave a gradient."""


class Trainer(RoundActor):
    """Runs as a Ray actor. `start` comes first."""

    def __init__(self, spec: RoundSpec, directory: str, threads: int) -> None:
        self._spec = spec
        self._directory = Path(directory)
        self._settings = Config.model_validate(spec.settings)
        self._threads = threads
        self._model: Any = None
        self._compute_dtype = "auto"

    def start(self, parent: AdapterRef | None) -> None:
        """Load the policy that the first stage starts from. Raises TrainError."""
        # Ray starts actors with one thread; torch reads the number before its first parallel section.
        os.environ["OMP_NUM_THREADS"] = str(self._threads)
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        import torch

        torch.set_num_threads(self._threads)
        if not torch.cuda.is_available():
            # Every pass allocates the same large tensors; mapping them anew takes a fifth of a step.
            keep_freed_memory()
        self.load(parent)
        # Importing TRL takes seconds; here that happens while the engines start.
        import_trl()

    def use_settings(self, settings: Mapping[str, Any]) -> None:
        """Those of the round (`Config`), once it is decided which reward counts."""
        self._settings = Config.model_validate(settings)

    def load(self, parent: AdapterRef | None) -> None:
        """Load the policy that a stage starts from, with nothing of the stage before. Raises TrainError."""
        spec, training = self._spec, self._settings.training
        dtype, self._compute_dtype = trainer_dtypes(spec.base_model, training.precision)
        quantization = self._settings.model.trainer_quantization
        self._model = load_policy(
            spec.base_model, parent, training.lora, spec.seed, dtype=dtype, quantization=quantization
        )

    def train(
        self,
        prompts: Sequence[Prompt],
        engines: Sequence[Any],
        make_grade: Callable[[Callable[[str], None]], Grade],
        gate_rollouts: int,
        adapter: Path,
        before: int,
    ) -> Trained:
        """Train with GRPO for the configured steps and write the adapter. Raises TrainError, or the judge's error.

        `make_grade` gets a callback for pauses. `gate_rollouts` is the number of rollouts of the following
        comparison, for the estimate of the remaining time. Earlier stages took so many steps `before`.
        """
        training = self._settings.training
        meter = Meter(self._directory, steps=before + training.steps, gate_rollouts=gate_rollouts)
        asked = self._settings.rollout.prompts_asked(training.prompts_per_step)
        meter.enter("training", asked * training.group_size)
        longest = max(prompt.max_tokens for prompt in prompts)
        with Collector.of(self._settings, engines, make_grade(meter.pause), meter) as collector:
            run = TrainingRun(self._spec, self._settings, self._directory, prompts, engines, collector, meter, before)
            refusal = self._optimize(
                self._settings, run.roll_out, run.report, longest, sync=lambda: run.sync(self._model)
            )
        if not refusal:
            save_adapter(self._model, adapter)
        run.clean_up()
        return Trained(
            run.steps_done,
            run.reward_first,
            run.reward_last,
            refusal,
            run.steps_done,
            run.usage,
            run.system_prompts,
            frozenset(run.with_gradient),
        )

    def imitate(
        self, replies: Sequence[RecordedReply], held_out: Sequence[RecordedReply], adapter: Path, before: int
    ) -> Trained:
        """Train on recorded replies (SFT) and write the adapter. `held_out` are replies of which only the loss is
        measured. Earlier stages took so many steps `before`. Raises TrainError."""
        settings = stage_settings(self._settings, "sft", len(replies))
        run = Epochs("sft", settings, self._directory, replies, self._spec.seed, before)
        longest = max(len(sample.token_ids) for reply in replies for sample in reply.samples)
        trainer = self._trainer(settings, lambda step: rows_of(run.items(step)), run.report, longest)
        run.measure = lambda: trainer.mean_nll(rows_of(held_out))
        trainer.train()
        save_adapter(self._model, adapter)
        return Trained(
            settings.training.steps, None, None, with_gradient=frozenset(reply.task_id for reply in replies)
        )

    def prefer(self, pairs: Sequence[Pair], adapter: Path, before: int) -> Trained:
        """Train on pairs (DPO) and write the adapter. Earlier steps of the round were so many, `before`. Raises
        TrainError."""
        from flywheel.training.optim.dpo import PairTrainer, dpo_config
        from flywheel.training.optim.grpo import StepLog, step_dataset

        settings = stage_settings(self._settings, "dpo", len(pairs))
        run = Epochs("dpo", settings, self._directory, pairs, self._spec.seed, before)
        directory, seed = self._directory / TRL_DIR, self._spec.seed
        PairTrainer(
            pairs_of=run.items,
            settings=settings,
            model=self._model,
            args=dpo_config(settings, directory, seed=seed, compute_dtype=self._dtype()),
            train_dataset=step_dataset(settings.training.steps),
            processing_class=self._tokenizer(),
            callbacks=[StepLog(run.report)],
        ).train()
        save_adapter(self._model, adapter)
        return Trained(settings.training.steps, None, None, with_gradient=frozenset(pair.task_id for pair in pairs))

    def _optimize(self, *arguments: Any, **options: Any) -> str:
        """Train. Returns why the stage was refused; empty if it was not."""
        try:
            self._trainer(*arguments, **options).train()
        except RoundRefusedError as reason:
            return str(reason)
        return ""

    def _trainer(
        self,
        settings: Config,
        rows: Callable[[int], Sequence[TrainingRow]],
        report: Callable[[int, Mapping[str, float]], None],
        longest: int,
        sync: Callable[[], None] = lambda: None,
    ) -> Any:
        from flywheel.training.optim.grpo import RoundTrainer, StepLog, grpo_config, step_dataset

        directory, seed = self._directory / TRL_DIR, self._spec.seed
        return RoundTrainer(
            roll_out=rows,
            sync_weights=sync,
            settings=settings,
            model=self._model,
            args=grpo_config(settings, directory, seed=seed, compute_dtype=self._dtype(), longest=longest),
            train_dataset=step_dataset(settings.training.steps),
            processing_class=self._tokenizer(),
            callbacks=[StepLog(report)],
        )

    def _dtype(self) -> Any:
        """The torch dtype in which it computes."""
        import torch

        return self._model.dtype if self._compute_dtype == "auto" else getattr(torch, self._compute_dtype)

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._spec.base_model)


class TrainingRun:
    """The steps of one round, as TRL calls for them."""

    def __init__(
        self,
        spec: RoundSpec,
        settings: Config,
        directory: Path,
        prompts: Sequence[Prompt],
        engines: Sequence[Any],
        collector: Collector,
        meter: Meter,
        before: int = 0,
    ) -> None:
        """Earlier stages took so many steps `before`, from which the numbers of these go on."""
        self._spec, self._settings, self._directory, self._before = spec, settings, directory, before
        self._engines, self._meter = engines, meter
        self._metrics = Metrics(directory, settings.tracking.events)
        self.adapter: LoadedAdapter | None = None
        """The adapter that the engines have of the current step."""
        self._sync_seconds = 0.0
        self._batch = RolloutBatch(())
        self._first: list[RolloutBatch] = []
        self._miss_shares: list[list[float]] = []
        self._miss_shares_of_calling: list[list[float]] = []
        self._step_started = time.monotonic()
        self.steps_done = 0
        self.reward_first: float | None = None
        self.reward_last: float | None = None
        self.usage: dict[str, int] = {}
        self.system_prompts: Counter[str] = Counter()
        self.with_gradient: set[str] = set()
        """Ids of the tasks that were trained on so far."""
        self._gap: float | None = None
        """The `logprob_gap` of the first step that was trained on."""
        self._steps = RoundSteps(spec, settings, prompts, collector)

    def sync(self, model: Any) -> None:
        """Load the current weights into the engines under a new name and number."""
        started = time.monotonic()
        old = self.adapter
        number = 1 if old is None else old.number + 1
        path = self._directory / SYNC_DIR / f"step-{number}"
        path.parent.mkdir(exist_ok=True)
        save_adapter(model, path)
        new = LoadedAdapter(f"{self._spec.round_id}-step-{number}", number, str(path))
        ray.get([engine.load.remote(new) for engine in self._engines])
        self.adapter = new
        if old is not None:
            # A step waits for all its rollouts, so the old adapter is no longer used. Its files may be deleted only
            # after the engines have unloaded it: an engine whose adapter files are missing dies.
            ray.get([engine.unload.remote(old) for engine in self._engines])
            shutil.rmtree(old.path)
        self._sync_seconds = time.monotonic() - started

    def roll_out(self, step: int) -> list[TrainingRow]:
        """What to train on of one step's rollouts, counted from 0. Raises RoundRefusedError and TrainError."""
        batch = self._batch = self._steps.collect(step, self.adapter)
        self.usage = add_usage(self.usage, batch.usage())
        self.system_prompts += batch.system_prompts
        training = self._settings.training
        append_rollouts(self._directory, self._before + step + 1, batch, training.scale_rewards)
        batch.refuse_failed(training.max_undecided_share)
        batch.refuse_undecided(training.max_undecided_share)
        try:
            self._refuse(step, batch)
        except RoundRefusedError:
            self._write_metrics(step + 1, {})
            raise
        rows = batch.rows(training.scale_rewards, mask_truncated=training.mask_truncated)
        self.with_gradient |= {batch.rollouts[row.rollout].request.prompt.task.task_id for row in rows}
        return rows

    def _refuse(self, step: int, batch: RolloutBatch) -> None:
        """Raise RoundRefusedError when the round must end after these rollouts."""
        training = self._settings.training
        if step < FIRST_LOOK:
            self._first.append(batch)
            if len(self._first) == min(FIRST_LOOK, training.steps):
                refuse_without_spread(self._first, training.min_spread_share)
        self._miss_shares.append(self._steps.miss_shares(batch))
        self._miss_shares_of_calling.append(self._steps.miss_shares(batch, of_calling=True))
        refuse_growing_misses(self._miss_shares, self._miss_shares_of_calling)

    def report(self, step: int, logs: Mapping[str, float]) -> None:
        """Write the metrics line of a completed step, which counts from 1. Raises TrainError."""
        reward = self._write_metrics(step, logs)
        self._meter.stepped(self._before + step, reward, collecting_seconds=sum(self._batch.seconds.values()))
        self.steps_done = step
        self.reward_last = reward
        self.reward_first = reward if step == 1 else self.reward_first
        if self._gap is None:
            self._gap = logs.get("rows/logprob_gap")
            refuse_wide_gap(self._gap, self._settings.model.trainer_quantization)

    def _write_metrics(self, step: int, logs: Mapping[str, float]) -> float | None:
        """Write the metrics line of a step and return its mean reward. Without `logs`, it was not trained on."""
        batch = self._batch
        now = time.monotonic()
        whole = now - self._step_started
        self._step_started = now
        parts = {**batch.seconds, "sync": self._sync_seconds}
        summary, usage = batch.summary(), batch.usage()
        trained = logs.get("rows/trained_tokens", 0.0)
        self._metrics.step(
            self._before + step,
            self._before + self._settings.training.steps,
            {
                **summary,
                **{name: logs.get(name) for name in UPDATE_FIGURES},
                **{
                    name: logs.get(f"rows/{name}")
                    for name in ("entropy", "logprob_gap", "ratio_mean", "ratio_capped_share")
                },
                "stage": "grpo",
                "clipped_share": logs.get("clip_ratio/region_mean"),
                "masked_share": 1 - trained / max(usage["rollout_tokens"], 1),
                "trained_tokens": int(trained),
                "temperature": self._settings.rollout.temperature,
                "tokens_per_second": usage["rollout_tokens"] / max(batch.seconds["generate"], 1e-9),
                "seconds": {**parts, "train": max(0.0, whole - sum(parts.values()))},
            },
        )
        reward: float | None = summary["reward_mean"]
        return reward

    def clean_up(self) -> None:
        """Remove step adapters, the last one after all engines have unloaded it."""
        if self.adapter is not None:
            ray.get([engine.unload.remote(self.adapter) for engine in self._engines])
        shutil.rmtree(self._directory / SYNC_DIR, ignore_errors=True)
        shutil.rmtree(self._directory / TRL_DIR, ignore_errors=True)
