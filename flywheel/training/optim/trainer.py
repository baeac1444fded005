"""The trainer: a Ray actor that trains the adapter of a round, stage by stage.

Each step of GRPO sends the adapter to the engines under a new name, collects graded rollouts, takes one optimizer
step and writes one metrics line. A stage that an earlier worker has begun goes on from its last checkpoint; the
complete steps behind it are trained again from their stored rollouts. SFT and DPO need no engine. The trainer starts
no engine and knows no judge; a factory for the grading function is passed in. Paths in the round's directory may be
relative to it.

With `training.workers`, several such actors train together (`ranks`). Each method but `meet` and `losses` must then
be called on all of them, and what the first one returns counts.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import ray

from flywheel.config.file import Config
from flywheel.records.round import AdapterRef, RoundSpec
from flywheel.system.process import keep_freed_memory
from flywheel.system.process_folder import ProcessFolder
from flywheel.training.data.graded_rollouts import GradedRollouts, StoredSteps
from flywheel.training.data.mirrored_folder import Change, MirroredFolder
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import LoadedAdapter, RolloutBatch, add_usage, mean
from flywheel.training.data.round_directory import (
    CHECKPOINTS_DIR,
    END_FILE,
    NOT_MIRRORED,
    SYNC_DIR,
    Checkpoint,
    go_on_from,
    last_checkpoint,
)
from flywheel.training.data.round_progress import TOKEN_MEANS, UPDATE_FIGURES, Meter, Metrics, read_steps
from flywheel.training.data.samples import Item, Pair, RecordedReply, TrainingRow, divided
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.adapter_files import AdapterFiles
from flywheel.training.engine.policy import (
    adapter_of_checkpoint,
    load_policy,
    save_adapter,
    trainer_dtypes,
    write_adapter,
)
from flywheel.training.engine.ray_cluster import RoundActor
from flywheel.training.optim.collapse import IN_A_ROW, CollapsedError, CollapseWatch
from flywheel.training.optim.collector import Collector, Grade
from flywheel.training.optim.epochs import Epochs, rows_of, stage_settings
from flywheel.training.optim.prefetch import Prefetch
from flywheel.training.optim.process_group import join, open_store, reach_store
from flywheel.training.optim.ranks import EndedError, Ranks
from flywheel.training.optim.rollout_grading import Pause
from flywheel.training.optim.round_steps import (
    FIRST_LOOK,
    MOST_UNTRAINED,
    RoundRefusedError,
    RoundSteps,
    UntrainedError,
    refuse_growing_misses,
    refuse_wide_gap,
    refuse_without_spread,
    why_untrained,
)

log = logging.getLogger("flywheel.training.worker")


def import_trl() -> None:
    """Import TRL for this process, without vLLM, and with an output layer for the scored tokens alone.

    TRL imports vLLM where it is installed, which takes longer than all the rest, and needs it only to generate
    (`use_vllm`), which the trainer never does. Where there is no Triton, it computes the output layer for the prompt
    and the padding, too: some devices compile anew for each number of tokens. A CPU does not.
    """
    # As an attribute of `trl`, which loads its modules lazily, it would not be found.
    from trl import import_utils

    import_utils.is_vllm_available = lambda *_, **__: False
    import trl.trainer.utils

    import flywheel.training.optim.grpo  # noqa: F401

    # It decides this there, and nothing else.
    trl.trainer.utils._use_triton = lambda _: True


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training run. With `refusal` there is no adapter."""

    steps: int
    """How many had a token to train."""
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
    ended: str = ""
    """Why training ended early; empty if it did not."""


class Trainer(RoundActor):
    """Runs as a Ray actor. `start` comes first."""

    def __init__(self, spec: RoundSpec, directory: str, threads: int, rank: int = 0) -> None:
        self._spec = spec
        self._directory = Path(directory)
        self._settings = Config.model_validate(spec.settings)
        self._threads = threads
        self._ranks = Ranks(rank, self._settings.training.workers)
        self._store: Any = None
        self._model: Any = None
        self._compute_dtype = "auto"
        self._mirror: MirroredFolder | None = None

    def sees(self, path: str) -> bool:
        return Path(path).exists()

    def use_copy(self) -> None:
        """Use a folder of this node in place of the round's directory, which is not here. `exchange` fills it."""
        self._copy = ProcessFolder(Path(ray.get_runtime_context().get_temp_dir()))
        self._directory = self._copy.path
        self._mirror = MirroredFolder(self._directory, NOT_MIRRORED)

    def exchange(self, changes: Sequence[Change]) -> list[Change]:
        """Make changes in the copy of the round's directory. Returns those that were made here. May be called while
        another method runs."""
        assert self._mirror is not None
        self._mirror.apply(changes)
        return self._mirror.changes()

    def stop(self) -> None:
        """Remove the copy: its node keeps nothing of the round."""
        self._copy.remove()

    def meet(self) -> tuple[str, int]:
        """Where the other processes meet this one, which is the first: host and port."""
        self._store = open_store(ray.util.get_node_ip_address(), self._ranks.workers)
        return self._store.host, self._store.port

    def start(self, parent: AdapterFiles | None, meeting: tuple[str, int] | None = None) -> None:
        """Load the policy that the first stage starts from, and wait for the other processes, if there are any, which
        `meet` here. Raises TrainError."""
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
        if meeting is not None:
            store = self._store or reach_store(*meeting, self._ranks.workers)
            join(store, self._ranks.rank, self._ranks.workers, ray.util.get_node_ip_address())

    def use_settings(self, settings: Mapping[str, Any]) -> None:
        """Those of the round (`Config`), once it is decided which reward counts."""
        self._settings = Config.model_validate(settings)

    def load(self, parent: AdapterFiles | None) -> None:
        """Load the policy that a stage starts from, with nothing of the stage before. Raises TrainError."""
        spec, training = self._spec, self._settings.training
        dtype, self._compute_dtype = trainer_dtypes(spec.base_model, training.precision)
        quantization = self._settings.model.trainer_quantization
        with contextlib.nullcontext() if parent is None else parent.written() as folder:
            adapter = None if folder is None else AdapterRef(name="parent", path=str(folder), sha256="")
            self._model = load_policy(
                spec.base_model, adapter, training.lora, spec.seed, dtype=dtype, quantization=quantization
            )

    def train(
        self,
        prompts: Sequence[Prompt],
        engines: list[Any],
        make_grade: Callable[[Path, Pause], Grade],
        gate_rollouts: int,
        adapter: Path,
        before: int,
    ) -> Trained:
        """Train with GRPO for the configured steps and write the adapter. Raises TrainError, or the judge's error.

        `make_grade` gets the round's directory and a callback for pauses. `gate_rollouts` is the number of rollouts
        of the following comparison, for the estimate of the remaining time. Earlier stages took so many steps
        `before`.
        """
        settings, updates = self._settings, self._settings.training.updates_per_batch
        training, adapter = settings.training, self._directory / adapter
        longest = max(prompt.max_tokens for prompt in prompts)
        if not self._ranks.is_first:
            return self._follow(self._trainer(settings, _nothing, _nothing, longest, adapter))
        meter = Meter(self._directory, steps=before + training.steps, gate_rollouts=gate_rollouts)
        store, refusal, ended = GradedRollouts(self._directory), "", ""
        with Collector.of(settings, engines, make_grade(self._directory, meter.pause), meter, store) as collector:
            sync = AdapterSync(self._model, engines, self._directory, self._spec.round_id, training.overlap)
            run = TrainingRun(self._spec, settings, self._directory, prompts, sync.load, collector, meter, before)
            trainer = self._trainer(settings, run.roll_out, run.report, longest, adapter)

            def begin() -> Checkpoint | None:
                checkpoint = go_on_from(adapter.parent, run.most_updates)
                run.recall(0 if checkpoint is None else checkpoint.updates // updates)
                return checkpoint

            try:
                with run:
                    self._run(trainer, begin)
            except CollapsedError as reason:
                # The rollouts of the first of these steps are already by weights that have collapsed.
                last_good = run.steps_done - IN_A_ROW - 1 - training.overlap
                good = last_checkpoint(adapter.parent, updates * last_good)
                refusal = str(reason)
                if training.on_collapse == "gate" and good is not None:
                    refusal, ended = "", f"{reason}; its adapter is that of step {good.updates // updates}"
                    adapter_of_checkpoint(good.path, adapter)
            except UntrainedError as reason:
                ended = str(reason)
            except RoundRefusedError as reason:
                refusal = str(reason)
        if not refusal and not run.steps_trained:
            refusal = ended or run.untrained
        if not refusal and not adapter.exists():
            save_adapter(self._model, adapter)
        sync.clean_up()
        return Trained(
            run.steps_trained,
            run.reward_first,
            run.reward_last,
            refusal,
            # With overlap, rollouts of a step behind the last one may be stored, too.
            max(run.steps_collected, len(StoredSteps(self._directory, before))),
            run.usage,
            run.system_prompts,
            frozenset(run.with_gradient),
            ended,
        )

    def imitate(
        self, replies: Sequence[RecordedReply], held_out: Sequence[RecordedReply], adapter: Path, before: int
    ) -> Trained:
        """Train on recorded replies (SFT) and write the adapter. `held_out` are replies of which only the loss is
        measured. Earlier stages took so many steps `before`. Raises TrainError."""
        adapter = self._directory / adapter
        settings = stage_settings(self._settings, "sft", len(replies))
        longest = max(len(sample.token_ids) for reply in replies for sample in reply.samples)
        if not self._ranks.is_first:
            return self._follow(self._trainer(settings, _nothing, _nothing, longest, adapter))
        run = Epochs("sft", settings, self._directory, replies, self._spec.seed, before)
        trainer = self._trainer(settings, lambda step: rows_of(run.items(step)), run.report, longest, adapter)
        run.measure = lambda: trainer.mean_nll(rows_of(held_out))
        self._run(trainer, lambda: go_on_from(adapter.parent))
        save_adapter(self._model, adapter)
        return Trained(
            settings.training.steps, None, None, with_gradient=frozenset(reply.task_id for reply in replies)
        )

    def losses(self, replies: Sequence[RecordedReply], adapter: Path) -> list[float | None]:
        """The mean negative log-likelihood of each reply under the loaded policy, in nats a token; None without a
        token. `load` must follow before the policy is trained. `adapter` is where that of the stage will be."""
        settings = stage_settings(self._settings, "sft", len(replies))
        longest = max(len(sample.token_ids) for reply in replies for sample in reply.samples)
        trainer = self._trainer(settings, _nothing, _nothing, longest, self._directory / adapter)
        return [trainer.mean_nll(rows_of([reply])) for reply in replies]

    def prefer(self, pairs: Sequence[Pair], adapter: Path, before: int) -> Trained:
        """Train on pairs (DPO) and write the adapter. Earlier steps of the round were so many, `before`. Raises
        TrainError."""
        from flywheel.training.optim.dpo import PairTrainer, dpo_config

        adapter, settings = self._directory / adapter, stage_settings(self._settings, "dpo", len(pairs))
        folder, seed = adapter.parent / CHECKPOINTS_DIR, self._spec.seed
        args = dpo_config(settings, folder, seed=seed, compute_dtype=self._dtype())
        if not self._ranks.is_first:
            return self._follow(PairTrainer(pairs_of=self._own(_nothing), **self._common(settings, args, _nothing)))
        run = Epochs("dpo", settings, self._directory, pairs, self._spec.seed, before)
        trainer = PairTrainer(pairs_of=self._own(run.items), **self._common(settings, args, run.report))
        self._run(trainer, lambda: go_on_from(adapter.parent))
        save_adapter(self._model, adapter)
        return Trained(settings.training.steps, None, None, with_gradient=frozenset(pair.task_id for pair in pairs))

    def _trainer(
        self,
        settings: Config,
        rows: Callable[[int], Sequence[TrainingRow]],
        report: Callable[[int, Mapping[str, float]], None],
        longest: int,
        adapter: Path,
    ) -> Any:
        from flywheel.training.optim.grpo import RoundTrainer, grpo_config

        folder, seed = adapter.parent / CHECKPOINTS_DIR, self._spec.seed
        args = grpo_config(settings, folder, seed=seed, compute_dtype=self._dtype(), longest=longest)
        return RoundTrainer(roll_out=self._own(rows), **self._common(settings, args, report))

    def _common(self, settings: Config, args: Any, report: Callable[[int, Mapping[str, float]], None]) -> Any:
        """Arguments of TRL's trainers. The others wait until rank 0 has reported a step, or ends there."""
        from flywheel.training.optim.grpo import EndAtCheckpoint, StepLog, step_dataset

        def reported(step: int, logs: Mapping[str, float]) -> None:
            self._ranks.from_first(lambda: report(step, logs))

        return {
            "settings": settings,
            "model": self._model,
            "args": args,
            "train_dataset": step_dataset(settings.training.steps * self._ranks.workers),
            "processing_class": self._tokenizer(),
            "callbacks": [StepLog(reported), EndAtCheckpoint(self._directory / END_FILE)],
        }

    def _own(self, items: Callable[[int], Sequence[Item]]) -> Callable[[int], Sequence[Item]]:
        """This process's part of the items of a step, which rank 0 has."""
        return lambda step: self._ranks.scatter(lambda: divided(items(step), self._ranks.workers))

    def _run(self, trainer: Any, begin: Callable[[], Checkpoint | None]) -> None:
        """Train all steps behind the checkpoint with which rank 0 begins."""

        def place() -> Path | None:
            checkpoint = begin()
            return None if checkpoint is None else checkpoint.path.relative_to(self._directory)

        # The directory may be another one on the nodes of the others.
        found = self._ranks.from_first(place)
        trainer.train(resume_from_checkpoint=None if found is None else str(self._directory / found))

    def _follow(self, trainer: Any) -> Trained:
        """Take part in the steps of rank 0, until it ends."""
        from transformers import PrinterCallback

        trainer.remove_callback(PrinterCallback)
        with contextlib.suppress(EndedError):
            self._run(trainer, lambda: None)
        return Trained(0, None, None)

    def _dtype(self) -> Any:
        """The torch dtype in which it computes."""
        import torch

        return self._model.dtype if self._compute_dtype == "auto" else getattr(torch, self._compute_dtype)

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._spec.base_model)


def _nothing(*_: Any) -> Any:
    """In place of what rank 0 does alone."""


class AdapterSync:
    """Loads the weights of each step into the engines."""

    def __init__(self, model: Any, engines: list[Any], directory: Path, round_id: str, overlap: int) -> None:
        """With `overlap`, rollouts of so many earlier adapters may be running while a new one is loaded."""
        self._model, self._engines, self._round_id, self._in_use = model, engines, round_id, overlap
        self._folder = directory / SYNC_DIR
        self._numbers = itertools.count(1)
        self._loaded: list[LoadedAdapter] = []

    def load(self) -> LoadedAdapter:
        """Load the current weights into the engines under a new name and number."""
        number = next(self._numbers)
        path = self._folder / f"step-{number}"
        path.parent.mkdir(exist_ok=True)
        write_adapter(self._model, path)
        files = AdapterFiles.read(path)
        shutil.rmtree(path)
        while len(self._loaded) > self._in_use:
            self._unload()
        new = ray_cluster.load(self._engines, f"{self._round_id}-step-{number}", number, files)
        self._loaded.append(new)
        return new

    def _unload(self) -> None:
        old = self._loaded.pop(0)
        ray_cluster.everywhere(self._engines, lambda engine: engine.unload.remote(old))

    def clean_up(self) -> None:
        """Unload and remove all."""
        while self._loaded:
            self._unload()
        shutil.rmtree(self._folder, ignore_errors=True)


class TrainingRun:
    """The steps of one round, as TRL calls for them."""

    def __init__(
        self,
        spec: RoundSpec,
        settings: Config,
        directory: Path,
        prompts: Sequence[Prompt],
        load: Callable[[], LoadedAdapter | None],
        collector: Collector,
        meter: Meter,
        before: int = 0,
    ) -> None:
        """`load` loads the current weights into the engines. Earlier stages took so many steps `before`, from which
        the numbers of these go on."""
        self._settings, self._before, self._name, self._directory = settings, before, spec.round_id, directory
        self._load, self._meter = load, meter
        self._metrics = Metrics(directory)
        self._seconds: dict[str, float] = {}
        self._collector, self._judged = collector, 0.0
        self._batch = RolloutBatch(())
        self._first: list[RolloutBatch] = []
        self._miss_shares: list[list[float]] = []
        self._miss_shares_of_calling: list[list[float]] = []
        self._step_started = time.monotonic()
        self.steps_done = self.steps_collected = self.steps_trained = 0
        self.untrained = ""
        """The last step without a token to train, and why it had none."""
        self._untrained_in_a_row = 0
        self.reward_first: float | None = None
        self.reward_last: float | None = None
        self.usage: dict[str, int] = {}
        self.system_prompts: Counter[str] = Counter()
        self.with_gradient: set[str] = set()
        """Ids of the tasks that were trained on so far."""
        self._gap: float | None = None
        """The `logprob_gap` of the first step that was trained on."""
        self._stored = StoredSteps(directory, before)
        self._steps = RoundSteps(spec, settings, prompts, collector, self._stored)
        self._prefetch = Prefetch(self._steps.collect, collector.close)
        self._collapse = CollapseWatch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._prefetch.close()

    @property
    def most_updates(self) -> int | None:
        """The last checkpoint that the run can go on from, in updates; None if any.

        With overlap, the rollouts of the first step that is not stored are by the weights before the last stored one,
        some of them perhaps graded.
        """
        training, stored = self._settings.training, len(self._stored)
        if not training.overlap or stored == training.steps:
            return None
        return training.updates_per_batch * max(0, stored - 1)

    def recall(self, steps: int) -> None:
        """Read the rollouts of steps that an earlier worker has taken and that its checkpoint contains. Raises
        TrainError."""
        entropies = {line["step"]: line.get("entropy") for line in read_steps(self._directory)} if steps else {}
        for step in range(steps):
            self.roll_out(step)
            self._count(step + 1)
            self._collapse.rolled_out(entropies.get(self._before + step + 1), self._batch)
        if steps:
            log.info("%s goes on from its checkpoint after step %d", self._name, self._before + steps)
            # It was within its limit when these steps were taken; without a token, it was not measured.
            self._gap = 0.0 if self.steps_trained else None
        known = {"step": self._before + steps, "reward_first": self.reward_first, "reward": self.reward_last}
        self._meter.enter("training", self._steps.asked * self._settings.training.group_size, **known)
        self._step_started = time.monotonic()

    def roll_out(self, step: int) -> list[TrainingRow]:
        """What to train on of one step's rollouts, counted from 0: those of the current weights, or those that an
        earlier worker has stored. Raises RoundRefusedError and TrainError."""
        batch = self._batch = self._collected(step)
        self.steps_collected = step + 1
        self.usage = add_usage(self.usage, batch.usage())
        self.system_prompts += batch.system_prompts
        training = self._settings.training
        batch.refuse_failed(training.max_undecided_share)
        batch.refuse_undecided(training.max_undecided_share)
        try:
            self._refuse(step, batch)
        except RoundRefusedError:
            self._write_metrics(step + 1, {})
            raise
        rows = batch.rows(training.scale_rewards, mask_truncated=training.mask_truncated)
        self.with_gradient |= {batch.rollouts[row.rollout].request.prompt.task.task_id for row in rows}
        self._untrained_in_a_row = 0 if rows else self._untrained_in_a_row + 1
        if not rows:
            why = why_untrained(batch, self._settings)
            self.untrained = f"step {self._before + step + 1} has no token to train: {why}"
            log.warning("%s; it counts as no step", self.untrained)
        return rows

    def _collected(self, step: int) -> RolloutBatch:
        """The rollouts of a step. With overlap, those of the next one are begun."""
        training = self._settings.training
        wanted = range(step, min(step + training.overlap, training.steps - 1) + 1)
        missing = [each for each in wanted if not self._steps.is_stored(each)]
        begun = time.monotonic()
        if begin := [each for each in missing if not self._prefetch.has(each)]:
            adapter = self._load()
            for each in begin:
                self._prefetch.begin(each, adapter)
        asked = time.monotonic()
        batch = self._prefetch.take(step) if step in missing else self._steps.collect(step, None)
        taken = time.monotonic()
        generated = min(max(asked, batch.generated_at or asked), taken)
        self._seconds = {"sync": asked - begun, "generate": generated - asked, "grade": taken - generated}
        return batch

    def _refuse(self, step: int, batch: RolloutBatch) -> None:
        """Raise RoundRefusedError when the round must end after these rollouts."""
        training = self._settings.training
        if step < FIRST_LOOK:
            self._first.append(batch)
            if len(self._first) == min(FIRST_LOOK, training.steps):
                refuse_without_spread(self._first, training.min_spread_share, self._settings.rollout)
        self._miss_shares.append(self._steps.miss_shares(batch))
        self._miss_shares_of_calling.append(self._steps.miss_shares(batch, of_calling=True))
        refuse_growing_misses(self._miss_shares, self._miss_shares_of_calling)

    def report(self, step: int, logs: Mapping[str, float]) -> None:
        """Write the metrics line of a completed step, counted from 1. Raises RoundRefusedError and TrainError."""
        self._write_metrics(step, logs)
        self._count(step)
        seconds = sum(self._batch.seconds.values())
        self._meter.stepped(self._before + step, self.reward_last, collecting_seconds=seconds)
        if self._gap is None:
            self._gap = logs.get("rows/logprob_gap")
            refuse_wide_gap(self._gap, self._settings.model.trainer_quantization)
        self._collapse.rolled_out(logs.get("rows/entropy"), self._batch)
        if self._untrained_in_a_row == MOST_UNTRAINED:
            raise UntrainedError(f"{self.untrained}; training ended after {MOST_UNTRAINED} such steps in a row")

    def _count(self, step: int) -> None:
        """Count a completed step with the rewards of its rollouts."""
        self.steps_done = step
        self.steps_trained += not self._untrained_in_a_row
        self.reward_last = mean(self._batch.rewards)
        self.reward_first = self.reward_last if step == 1 else self.reward_first

    def _write_metrics(self, step: int, logs: Mapping[str, float]) -> None:
        """Write the metrics line of a step. Without `logs`, it was not trained on."""
        batch = self._batch
        now = time.monotonic()
        whole = now - self._step_started
        self._step_started = now
        parts = self._seconds
        train = max(0.0, whole - sum(parts.values()))
        judged, self._judged = self._judged, self._collector.judge_seconds
        summary, usage = batch.summary(), batch.usage()
        trained = logs.get("rows/trained_tokens", 0.0)
        self._metrics.step(
            self._before + step,
            self._before + self._settings.training.steps,
            {
                **summary,
                **{name: logs.get(name) for name in UPDATE_FIGURES},
                **{name: logs.get(f"rows/{name}") for name in TOKEN_MEANS},
                "stage": "grpo",
                "masked_share": 1 - trained / max(usage["rollout_tokens"], 1),
                "trained_tokens": int(trained),
                "temperature": self._settings.rollout.temperature,
                "tokens_per_second": usage["rollout_tokens"] / max(batch.seconds.get("generate", 0.0), 1e-9),
                "overlap": self._settings.training.overlap,
                "seconds": {**parts, "train": train},
                "busy": {
                    "engines": batch.seconds.get("generate", 0.0),
                    "judge": self._judged - judged,
                    "trainer": train,
                },
            },
        )
