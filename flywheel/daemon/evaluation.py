"""Evaluation: a model answers the tasks of a benchmark as in the gate, and its answers are measured.

A base model and adapters answer in a worker process, as in a round; a model at an endpoint is asked from here. Each
evaluation has a directory of its own, named by the hash of what is measured, with the graded answers as they come:
one that was stopped goes on there.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Coroutine
from concurrent import futures
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings
from flywheel.daemon import evaluation_log
from flywheel.daemon.evaluation_answers import Answers, answers_in
from flywheel.daemon.file_round import RoundNames, adapter_in, base_model_of, read_tasks, require_packages, run_worker
from flywheel.daemon.judging.judge_setup import judge_settings
from flywheel.daemon.judging.judging_report import Cost, CostEstimator, JudgingEstimate
from flywheel.daemon.judging.quality_bar import metrics_of
from flywheel.daemon.rounds.planner import missing_base_model
from flywheel.daemon.rounds.round_tasks import round_tasks
from flywheel.daemon.rounds.suites import require_grader
from flywheel.errors import ConfigError
from flywheel.judge.agent_metrics import SCORE
from flywheel.judge.filters.chain import chain_of
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.usage import Purpose
from flywheel.records.round import (
    ANSWERS_FILE,
    RESULT_FILE,
    SPEC_FILE,
    AdapterRef,
    RoundResult,
    RoundSpec,
    RoundTask,
)
from flywheel.records.states import Split
from flywheel.records.tool_calls import SharedRecordings
from flywheel.secrets import masked_url
from flywheel.serving.adapter_files import why_unloadable
from flywheel.sources.jsonl.data_set import trainer_python
from flywheel.store import deployments, rounds, samples
from flywheel.system.files import PRIVATE, expanded, json_line, make_private, write_atomic
from flywheel.system.http_client import is_http_url
from flywheel.system.lock import alone_in
from flywheel.system.signals import in_daemon_thread
from flywheel.training.data.graded_rollouts import GradedRollouts
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.round_directory import FORMAT, clear, go_on, identity_of, is_of
from flywheel.training.data.round_progress import Meter
from flywheel.training.engine.remote_engine import (
    LocalCalls,
    RemoteApplication,
    RemoteEngine,
    event_loop,
)
from flywheel.training.engine.rollout_engine import ProgramSetup
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.held_out_evaluation import answer_alone
from flywheel.training.optim.rollout_grading import build_grade, has_judge, without_judge
from flywheel.training.program.agent_program import ModelEndpoint
from flywheel.training.recorded.recorded_rollout import ToolSetup

HELD_OUT: Final = Split.HELD_OUT.value
BASE: Final = "base"
_NAMES: Final = RoundNames("evaluation", "evaluate a model", "--benchmark", "--benchmark")


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """What is measured: a base model, with an adapter or without, or a model at an endpoint."""

    name: str
    base_model: str = ""
    adapter: AdapterRef | None = None
    remote: ModelEndpoint | None = None

    def json(self) -> dict[str, Any]:
        if self.remote is not None:
            return {"name": self.name, "base_url": self.remote.base_url}
        sha256 = self.adapter.sha256 if self.adapter is not None else None
        return {"name": self.name, "base_model": self.base_model, "adapter_sha256": sha256}


def model_named(
    name: str, config: Config, conn: Connection | None, base_url: str | None = None, api_key: str = ""
) -> EvaluatedModel:
    """The model that a command line names: `base`, an alias (what is deployed), a round's adapter, a folder with an
    adapter or a model, or what an endpoint has by this name. Without a state, `conn` is None. Raises ConfigError."""
    attempted, base = f"evaluate {name}", config.model.base
    if base_url is not None:
        if not is_http_url(base_url):
            hint = "Name the root of the API, such as http://127.0.0.1:8000/v1."
            raise ConfigError(attempted, f"{base_url} is no HTTP URL", hint)
        return EvaluatedModel(name, remote=ModelEndpoint(masked_url(base_url.rstrip("/")), name, api_key))
    folder = folder_named(name)
    if name == BASE:
        return EvaluatedModel(BASE, base)
    if name in config.aliases:
        active = deployments.active(conn, name) if conn is not None else None
        adapter = active.adapter if active is not None else None
        if adapter is None:
            return EvaluatedModel(name, base)
    elif folder.is_dir():
        if (folder / "config.json").is_file() and not (folder / "adapter_config.json").exists():
            return EvaluatedModel(folder.name, str(folder))
        own = base_model_of(folder, attempted)
        if own and not missing_base_model(own):
            base = own
        return EvaluatedModel(folder.name, base, adapter_in(folder, attempted))
    else:
        adapter = name
    row = rounds.adapter(conn, adapter) if conn is not None else None
    if conn is None or row is None:
        raise ConfigError(
            attempted,
            "no folder, alias or adapter of the state has this name",
            f"Name one of them, `{BASE}`, or with --base-url the name that an endpoint has for its model."
            f" Aliases: {', '.join(config.aliases)}.",
        )
    shown = name if name == adapter else f"{name} ({adapter})"
    return EvaluatedModel(shown, row.base_model, rounds.adapter_ref(conn, adapter))


def folder_named(name: str) -> Path:
    """The folder that a command line names, if it is one. Raises ConfigError for what can be none."""
    try:
        return expanded(Path(name)).absolute()
    except ValueError as error:
        raise ConfigError(f"evaluate {name}", str(error), "Name another folder.") from None


def is_evaluation(folder: Path) -> bool:
    """Whether a folder is the directory of an evaluation that has ended."""
    return all((folder / name).is_file() for name in (SPEC_FILE, RESULT_FILE, ANSWERS_FILE))


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Tasks to answer, and the results of other traces that answer their tools."""

    name: str
    tasks: tuple[RoundTask, ...]
    shared: SharedRecordings = field(default_factory=SharedRecordings)


def held_out_tasks(conn: Connection, config: Config, limit: int | None) -> Benchmark:
    """The newest held-out tasks, at most `gate.max_tasks`. Raises ConfigError if there is none."""
    ids = samples.held_out(conn, limit or config.gate.max_tasks, config.takes.gate)
    found = round_tasks(conn, [], ids, config)
    if not found.held_out:
        why = "the gate has no judged held-out task"
        raise ConfigError("evaluate on held-out tasks", why, "Collect and judge more traces, or name a file.")
    return Benchmark(HELD_OUT, tuple(found.held_out), found.shared_gate)


def tasks_of_file(file: Path, config: Config, limit: int | None) -> Benchmark:
    """The tasks of a file in any form that `flywheel train` reads. Raises ConfigError."""
    found = read_tasks([file], _NAMES.data, config, trainer_python(None), compares=True)
    return Benchmark(str(file), tuple(found[:limit]))


def evaluation_settings(config: Config, answers: int) -> Config:
    """The settings of an evaluation with so many answers to each task."""
    gate = config.gate.model_copy(update={"samples": answers})
    # No stage trains: none of its demands on tasks counts.
    training = config.training.model_copy(update={"stages": ["grpo"]})
    judge = judge_settings(config, chain_of(config))
    return config.model_copy(update={"gate": gate, "training": training, "judge": judge})


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. `settings` are those of `evaluation_settings`."""

    model: EvaluatedModel
    benchmark: Benchmark
    rubric: Rubric
    settings: Config

    @cached_property
    def spec(self) -> RoundSpec:
        """As the worker gets it."""
        settings = self.settings
        return RoundSpec(
            round_id=_NAMES.round_id,
            attempt=1,
            seed=settings.training.seed,
            debug=False,
            base_model=self.model.base_model,
            parent=self.model.adapter,
            target=settings.target,
            train=[],
            held_out=list(self.benchmark.tasks),
            rubric=self.rubric.model_dump(mode="json"),
            settings=settings.model_dump(mode="json"),
            evaluates=True,
            shared_gate=self.benchmark.shared,
        )

    @cached_property
    def directory(self) -> Path:
        """Where its files are: equal evaluations have the same."""
        remote = self.model.remote
        # Those of earlier formats of a round's files are not measured again.
        parts = {name: part for name, part in identity_of(self.spec).items() if name != FORMAT}
        key = [parts, remote and [remote.base_url, remote.model]]
        name = hashlib.sha256(json_line(key)).hexdigest()[:16]
        return self.settings.state_dir / evaluation_log.FOLDER / name

    @property
    def is_known(self) -> bool:
        """Whether it was measured whole, and cannot come out otherwise: the weights and the tasks are the same. An
        endpoint and the code of an agent may have changed."""
        if self.model.remote is not None or isinstance(self.settings.rollout.agent, AgentProgramSettings):
            return False
        return is_evaluation(self.directory)

    @property
    def goes_on(self) -> bool:
        """Whether an earlier run of it was stopped."""
        return is_of(self.directory, self.spec)

    def check(self) -> None:
        """Raise FlywheelError, before anything is paid for, if the model cannot answer here."""
        if self.model.remote is not None:
            return
        require_packages(_NAMES.attempted)
        attempted, adapter = f"evaluate {self.model.name}", self.model.adapter
        if why := missing_base_model(self.model.base_model):
            hint = "Set model.base to a model's directory, or to its name on the hub."
            raise ConfigError(attempted, why, hint)
        if adapter is not None and (why := why_unloadable(Path(adapter.path), sha256=adapter.sha256)):
            hint = "Old adapters are removed (retention.keep_days): name another one, or a copy of it."
            raise ConfigError(attempted, why, hint)

    def estimate(self, used: dict[str, int], models: int) -> Cost:
        """What judging the answers of so many models would cost, if they are as long as the recorded ones. `used` is
        what earlier calls of the judge used (`usage_of_judge`)."""
        found, settings = JudgingEstimate(), self.settings
        with closing(self.grader()) as grader:
            for task in self.benchmark.tasks if has_judge(settings) else ():
                exchange = replace(task.exchange, answer=task.exchange.reference, trajectory=task.steps)
                needed = grader.estimate(exchange)
                for _ in range(models * (settings.gate.samples or 1)):
                    found.add(needed)
        return CostEstimator(used, settings.judge.prices).cost(found)

    @property
    def judge_hash(self) -> str:
        """Names the judge among others."""
        with closing(self.grader()) as grader:
            return grader.judge_hash

    def grader(self) -> Grader:
        return Grader(self.rubric, self.settings.judge)

    async def run(self) -> Answers:
        """Let the model answer. A cancellation stops it; the next run goes on. Raises FlywheelError."""
        if not self.is_known:
            require_grader(self.settings, self.rubric)
            make_private(self.directory)
            if self.model.remote is None:
                await run_worker(self.spec, self.directory, self.settings)
            else:
                stop = threading.Event()
                try:
                    await in_daemon_thread(partial(_ask_endpoint, self, self.model.remote, stop))
                finally:
                    stop.set()
        answers = await asyncio.to_thread(answers_in, self.directory)
        if self.benchmark.name == HELD_OUT:
            score = metrics_of(answers.cases, [SCORE], self.settings.training.seed)[SCORE]
            evaluation_log.add(self.settings.state_dir, self.model.json(), self.rubric.hash, score)
        return answers


def _ask_endpoint(evaluation: Evaluation, model: ModelEndpoint, stop: threading.Event) -> None:
    """Let a model at an endpoint answer, with the code of a worker: the gate's requests, recorded tools and grading.
    Raises FlywheelError, and CancelledError after `stop`."""
    directory, spec, settings = evaluation.directory, evaluation.spec, evaluation.settings

    def check() -> None:
        if stop.is_set():
            raise futures.CancelledError

    with alone_in(directory), event_loop() as loop:
        write_atomic(directory / SPEC_FILE, spec.model_dump_json(indent=1).encode(), mode=PRIVATE)
        go_on(directory, spec)
        meter, prompts = Meter(directory, steps=0), [Prompt(task, ()) for task in spec.held_out]
        make_grade = build_grade if has_judge(settings) else without_judge
        grade = make_grade(spec, directory, Purpose.GATES, meter.pause)
        application = RemoteApplication(model, seconds=settings.rollout.timeout_seconds)
        meter.enter("evaluating", len(prompts) * settings.gate.samples_for(len(prompts)))
        began, engine = time.monotonic(), RemoteEngine(application)

        def done(work: Coroutine[Any, Any, object]) -> None:
            asyncio.run_coroutine_threadsafe(work, loop).result()

        done(engine.start())
        try:
            rollout = settings.rollout
            setup = ToolSetup(spec.shared_gate, "end", tuple(rollout.finish_tools), rollout.max_turns)
            engine.use_tools(setup, setup)
            if isinstance(rollout.agent, AgentProgramSettings):
                program = ProgramSetup.of(settings, spec.target or settings.model.alias)
                done(engine.use_program(spec.settings, program))
            store, calls = GradedRollouts(directory), LocalCalls(loop)
            with Collector.of(
                settings, [engine], grade, meter=meter, store=store, calls=calls, check=check
            ) as collector:
                at_once = settings.judge.max_thread
                usage = answer_alone(prompts, None, spec, settings, collector, directory, at_once=at_once)
        finally:
            done(engine.stop())
        seconds = round(time.monotonic() - began, 3)
        result = RoundResult(
            round_id=spec.round_id,
            outcome="evaluated",
            usage={**usage, **application.usage},
            seconds={"evaluate": seconds, "total": seconds},
        )
        write_atomic(directory / RESULT_FILE, result.model_dump_json(indent=1).encode(), mode=PRIVATE)
        clear(directory, is_over=True)
