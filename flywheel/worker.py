"""The round worker: `python -m flywheel.worker ROUND_DIR`.

Reads `spec.json`, composes engines, trainer, judge and comparison into one round, reports in `metrics.jsonl`, and
ends with `result.json` as its last word. When it fails, `error.json` has the error, the remedy and whether a retry
helps.

A round has no checkpoints: a worker that is started again on the same directory removes what an earlier one left
unfinished and starts over. A directory with a whole result is left as it is.

Exit codes: 0 done (also when the round was refused), 1 failed, 75 another worker is at it, 143 and 130 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import ray

from flywheel import log as logs
from flywheel.config import Config
from flywheel.errors import EXIT_FAILED, FlywheelError, LockedError, TrainError
from flywheel.evaluation.compare import Paired, compare, compare_criterion
from flywheel.files import tree_sha256, write_atomic
from flywheel.round import (
    ADAPTER_DIR,
    LOG_FILE,
    RESULT_FILE,
    AdapterRef,
    Comparison,
    RoundResult,
    RoundSpec,
    RoundTask,
)
from flywheel.rubric import Rubric
from flywheel.training import cluster
from flywheel.training.chat import served_format
from flywheel.training.collector import Collector, Grade
from flywheel.training.debug import roll_out_only
from flywheel.training.directory import clear, finished, read_spec, settings_of, start_over, write_error
from flywheel.training.engine import Engine, EngineSettings
from flywheel.training.held_out import Pairs, answer, check_enough
from flywheel.training.metrics import Metrics
from flywheel.training.policy import check_base, check_parent, other_form, rank
from flywheel.training.probe import make_probe
from flywheel.training.process import Stopped, alone_in, catch_signals, output_to
from flywheel.training.prompts import Asked, Prompt, asked
from flywheel.training.rollout import LoadedAdapter, add_usage
from flywheel.training.trainer import Trainer

log = logging.getLogger("flywheel.worker")

MakeGrade = Callable[[RoundSpec], Grade]


def rubric_of(spec: RoundSpec) -> Rubric:
    """The round's rubric. Raises ConfigError."""
    from flywheel.judge.rubric_file import parse_rubric

    return parse_rubric(spec.rubric, f"the rubric of {spec.round_id}")


def build_grade(spec: RoundSpec) -> Grade:
    """The round's rubric as a callable. Raises ConfigError for a rubric or a judge that cannot work."""
    from flywheel.judge.grader import Grader

    settings = Config.model_validate(spec.settings)
    return Grader(rubric_of(spec), settings.judge).grade


class Round:
    """One round on a running Ray session."""

    def __init__(self, spec: RoundSpec, directory: Path, settings: Config, make_grade: MakeGrade) -> None:
        self.spec, self.directory, self.settings = spec, directory, settings
        self.make_grade = make_grade
        self.grade = make_grade(spec)
        self.metrics = Metrics(directory)
        self.engines: list[Any] = []
        self.trainer: Any = None
        self.seconds: dict[str, float] = {}
        self.usage: dict[str, int] = {}
        self.about: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}

    def start(self) -> None:
        """Start engines and trainer side by side."""
        rollout, training = self.settings.rollout, self.settings.training
        share = cluster.gpu_share(rollout.engines)
        engine = EngineSettings(
            model=self.spec.base_model,
            max_model_len=rollout.max_model_len,
            max_lora_rank=rank(self.spec.parent, training.lora),
            seed=self.spec.seed,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_gib=rollout.cpu_kv_cache_gib,
            cpu_threads=cluster.cpu_threads(),
            chat=served_format(self.settings.serving.extra_args),
        )
        self.engines = [cluster.start(Engine, engine, gpus=share) for _ in range(rollout.engines)]
        started = [engine.start.remote() for engine in self.engines]
        if not self.spec.debug:
            self.trainer = cluster.start(Trainer, self.spec, str(self.directory), cluster.cpu_threads(), gpus=share)
            started.append(self.trainer.start.remote())
        self.about = cluster.wait(started)[0]

    def asked(self, tasks: Sequence[RoundTask]) -> Asked:
        """The tasks that the model can be asked: rendered by its template, short enough, and none twice."""
        rollout = self.settings.rollout
        [(prompts, refused)] = cluster.wait([self.engines[0].encode.remote(list(tasks))])
        found = asked(
            prompts, refused, max_model_len=rollout.max_model_len, max_completion_tokens=rollout.max_completion_tokens
        )
        for task, why in found.left_out.items():
            log.warning("%s is left out: %s", task, why)
        if tasks and len(refused) == len(tasks):
            first = next(f"{task}: {why}" for task, why in refused.items())
            raise TrainError(
                f"render the prompts of {self.spec.round_id}",
                f"the chat template refuses all {len(tasks)} tasks; the first: {first}",
                "Check the base model's chat template, and the one in serving.extra_args if there is one.",
            )
        return found

    def run(self) -> RoundResult:
        with self._timed("start"):
            self.start()
            train = self.asked(self.spec.train)
            held_out = [] if self.spec.debug else self.asked(self.spec.held_out).prompts
        prompts, self.left_out = train.prompts, train.left_out
        if not prompts:
            raise TrainError(
                f"train {self.spec.round_id}",
                f"none of its {len(self.spec.train)} tasks leaves room for a completion in rollout.max_model_len",
                "Raise rollout.max_model_len or lower rollout.max_completion_tokens.",
            )
        if not self.spec.debug:
            # Now, and not when hours were spent on a candidate that could only be rejected.
            check_enough(held_out, self.spec, self.settings.gate.min_tasks)
        self.metrics.phase("training", prompts=len(prompts), left_out=len(self.left_out))
        if self.spec.debug:
            return self._debug(prompts)
        with self._timed("train"):
            [trained] = cluster.wait([self.trainer.train.remote(prompts, self.engines, self.make_grade)])
            ray.kill(self.trainer)
        self.usage = trained.usage
        figures = {
            "steps": trained.steps,
            "reward_first": trained.reward_first,
            "reward_last": trained.reward_last,
        }
        if trained.refusal:
            return self._result("refused", reason=trained.refusal, **figures)
        path = self.directory / ADAPTER_DIR
        adapter = AdapterRef(name=self.spec.round_id, path=str(path), sha256=tree_sha256(path))
        with self._timed("evaluate"):
            held_out = held_out[-self.settings.gate.max_tasks :]
            self.metrics.phase("evaluating", prompts=len(held_out))
            # Numbers go on where the steps ended: an engine must never meet one twice.
            candidate = self._load(adapter, self.settings.training.steps + 1)
            deployed = self._load(self.spec.parent, self.settings.training.steps + 2)
            comparison = self._compare(held_out, candidate, deployed)
            probe = make_probe(
                self.engines[0],
                held_out,
                candidate,
                max_model_len=self.settings.rollout.max_model_len,
            )
        return self._result("trained", adapter=adapter, comparison=comparison, probe=probe, **figures)

    @overload
    def _load(self, adapter: AdapterRef, number: int) -> LoadedAdapter: ...

    @overload
    def _load(self, adapter: None, number: int) -> None: ...

    @overload
    def _load(self, adapter: AdapterRef | None, number: int) -> LoadedAdapter | None: ...

    def _load(self, adapter: AdapterRef | None, number: int) -> LoadedAdapter | None:
        """The adapter on every engine; None is the base model, which needs no loading."""
        if adapter is None:
            return None
        loaded = LoadedAdapter(f"{adapter.name}-{number}", number, adapter.path)
        cluster.wait([engine.load.remote(loaded) for engine in self.engines])
        return loaded

    def _debug(self, prompts: list[Prompt]) -> RoundResult:
        adapter = self._load(self.spec.parent, 1)
        with self._timed("train"), self._collector() as collector:
            debug = roll_out_only(self.spec, self.settings, self.directory, prompts, collector, adapter)
        self.usage = debug.usage
        return self._result(
            "debug",
            reason=debug.summary,
            steps=debug.steps,
            reward_first=debug.reward_first,
            reward_last=debug.reward_last,
        )

    def _compare(self, prompts: list[Prompt], candidate: LoadedAdapter, deployed: LoadedAdapter | None) -> Comparison:
        gate = self.settings.gate
        with self._collector() as collector:
            answers = answer(prompts, (candidate, deployed), self.spec, self.settings, collector)
        self.usage = add_usage(self.usage, answers.usage)

        def paired(pairs: Pairs) -> list[Paired]:
            return [Paired(prompt.task.task_id, *sides) for prompt, sides in zip(prompts, pairs, strict=True)]

        whole = compare(
            paired(answers.rewards), samples=gate.samples, confidence=gate.confidence, seed=self.spec.seed
        )
        criteria = [
            compare_criterion(
                criterion.id,
                paired(answers.values[criterion.id]),
                takes_away=criterion.weight < 0,
                confidence=gate.confidence,
                seed=self.spec.seed,
            )
            for criterion in rubric_of(self.spec).every
            if criterion.id in answers.values
        ]
        return whole.model_copy(update={"criteria": criteria})

    def _collector(self) -> Collector:
        return Collector(
            self.engines,
            self.grade,
            max_thread=self.settings.judge.max_thread,
            timeout_seconds=self.settings.rollout.timeout_seconds,
        )

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 3)

    def _result(self, outcome: Any, **fields: Any) -> RoundResult:
        return RoundResult(
            round_id=self.spec.round_id,
            outcome=outcome,
            left_out=self.left_out,
            seconds=self.seconds,
            usage=self.usage,
            versions=self.about["versions"],
            device=self.about["device"],
            **fields,
        )


def run_round(spec: RoundSpec, directory: Path, make_grade: MakeGrade) -> RoundResult:
    """The whole round, with nothing of it left running. Raises FlywheelError."""
    started = time.monotonic()
    settings = settings_of(spec)
    if not spec.train:
        raise TrainError(f"train {spec.round_id}", "it has no task", "Collect and judge more traces first.")
    check_base(spec.base_model)
    check_parent(spec.parent)
    if spec.parent and (form := other_form(spec.parent, settings.training.lora)):
        log.warning(
            "training.lora is not used: %s, which this round goes on from, has %s. For a new form, go back to the"
            " base model first (`flywheel rollback --to base`)",
            spec.parent.name,
            form,
        )
    # Before anything is started: a rubric or a judge that cannot work shows itself here.
    whole = Round(spec, directory, settings, make_grade)
    whole.metrics.phase("starting")
    with cluster.session(settings):
        # Ray has just installed handlers of its own.
        catch_signals()
        try:
            result = whole.run()
        finally:
            if not isinstance(sys.exception(), Stopped):
                cluster.stop(whole.engines)
    total = round(time.monotonic() - started, 3)
    return result.model_copy(update={"seconds": {**result.seconds, "total": total}})


def as_flywheel_error(error: Exception, spec: RoundSpec) -> FlywheelError:
    # Libraries that write by themselves have errors of their own, with the system's words.
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "Free space." if full or os.strerror(errno.ENOSPC) in str(error) else ""
    return TrainError(
        f"run {spec.round_id}",
        f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
        hint or f"The traceback is in the round's {LOG_FILE}.",
        retryable=True,
    )


def work(directory: Path, make_grade: MakeGrade) -> None:
    """Run the round of this directory. Raises FlywheelError and Stopped."""
    spec = read_spec(directory)
    try:
        _work(directory, spec, make_grade)
    except OSError as error:
        raise as_flywheel_error(error, spec) from error


def _work(directory: Path, spec: RoundSpec, make_grade: MakeGrade) -> None:
    with alone_in(directory):
        if finished(directory, spec):
            return
        start_over(directory)
        with output_to(directory / LOG_FILE):
            logs.setup()
            try:
                result = run_round(spec, directory, make_grade)
            except FlywheelError as error:
                log.error("%s", error)
                raise
            except Exception as error:
                log.exception("%s failed", spec.round_id)
                raise as_flywheel_error(error, spec) from error
            finally:
                clear(directory)
        write_atomic(directory / RESULT_FILE, result.model_dump_json(indent=1).encode())


def main(argv: Sequence[str] | None = None, make_grade: MakeGrade = build_grade) -> int:
    parser = argparse.ArgumentParser(prog="python -m flywheel.worker", description="Run one training round.")
    parser.add_argument("directory", type=Path, metavar="ROUND_DIR", help="holds spec.json; the results go there too")
    directory = parser.parse_args(argv).directory.absolute()
    catch_signals()
    cluster.adopt_orphans()
    try:
        work(directory, make_grade)
    except Stopped as stopped:
        return _end(stopped, stopped.exit_code)
    except LockedError as error:
        return _end(error, error.exit_code)
    except FlywheelError as error:
        write_error(directory, error)
        return _end(error, EXIT_FAILED)
    return 0


def _end(reason: BaseException, code: int) -> int:
    print(f"flywheel.worker: {reason}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    # Under its own name, so that actors find `build_grade` where it is.
    from flywheel import worker  # noqa: PLW0406 - as a script this module has no importable name

    # Threads that still wait for a judge's answer would hold an ordinary exit back.
    os._exit(worker.main())
