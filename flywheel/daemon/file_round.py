"""A round on files, without a daemon: `flywheel.tune`, `sft`, `dpo`, `grpo` and `flywheel train` run one."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds.file_tasks import ReadRows, rows, sentence_of, task_of
from flywheel.daemon.rounds.sample_selection import choose_of_file
from flywheel.daemon.rounds.suites import apart_from, require_grader, suites_of
from flywheel.daemon.rounds.trackers import Trackers, decision_of, require_trackers
from flywheel.daemon.rounds.worker_process import WorkerProcess, missing_in, result_of
from flywheel.daemon.rounds.worker_watch import WorkerWatch
from flywheel.errors import ConfigError, TrainError
from flywheel.judge.filters.chain import chain_of
from flywheel.records.reasons import in_one_clause
from flywheel.records.round import AdapterRef, Comparison, GateTest, RoundResult, RoundSpec, RoundTask
from flywheel.records.similarity import Questions, normalised
from flywheel.records.tool_calls import said_in
from flywheel.serving.adapter_files import why_unloadable
from flywheel.sources.jsonl.data_set import DataSet, trainer_python
from flywheel.sources.jsonl.record import DataRow, has_target
from flywheel.store.splits import TEMPLATE
from flywheel.system import own_package
from flywheel.system.files import tree_sha256
from flywheel.system.terminal import quantity
from flywheel.system.yaml_file import explain
from flywheel.training.data.pairs import are_apart
from flywheel.training.data.round_directory import is_of
from flywheel.training.gate.gate import alpha_of, decide
from flywheel.training.program.program_child import MARK

log = logging.getLogger(__name__)

ATTEMPTED: Final = "tune the workflow"
PACKAGES: Final = ("torch", "transformers", "trl", "peft", "ray", "vllm")
_CONTEXT: Final = "all its messages have the weight 0 (as calls without arguments do)"
_TIE: Final = "its replies are equal, or their scores differ by less than training.dpo.margin"
RELEASED: Final = "the round took others of its pool, by their loss or diversity (training.coreset)"
NOT_COMPARED: Final = "not compared with the starting model: there is no rubric to grade answers"


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a round made.

    Attributes:
        adapter: The directory of the trained LoRA adapter; None if the round was refused.
        is_better: Whether the adapter is shown to be better on the held-out tasks than the base model, or than the
            adapter that the round started from.
        reason: Why it is or is not, why it was not compared, or why the round was refused.
        comparison: The figures of that.
        directory: The files of the round: `metrics.jsonl`, `rollouts/`, `worker.log` and others.
        reward_first, reward_last: Mean rewards of the first and the last step.
        left_out: Tasks that were not trained on, or held out and not measured, by id, with the reason.
        partly: Tasks of whose replies something was not trained on, by id, with the reason.
    """

    adapter: Path | None
    is_better: bool
    reason: str
    comparison: Comparison | None
    directory: Path
    steps: int
    reward_first: float | None
    reward_last: float | None
    left_out: dict[str, str] = field(default_factory=dict)
    partly: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundNames:
    """What the round and its arguments are called where it was started, for messages."""

    round_id: str
    attempted: str
    data: str
    held_out: str


TUNE: Final = RoundNames("tune", ATTEMPTED, "train_dataset", "eval_dataset")


def spec_of(
    settings: Config,
    data: Any,
    held_out: Any,
    *,
    parent: Path | None = None,
    compares: bool = True,
    names: RoundNames = TUNE,
    epochs: int | None = None,
    python: Path | None = None,
    read: ReadRows | None = None,
) -> RoundSpec:
    """A round on files, with data sets as in `tasks_of`, that starts from the adapter in the folder `parent`. If it
    does not compare its adapter with that, nothing is graded. A step asks at most the tasks that there are; with
    `epochs`, the round has as many steps as ask each task so often. What is known of the rows goes to `read`. Raises
    ConfigError."""
    read = read or ReadRows()
    require_trackers(settings.tracking, names.attempted, python or trainer_python(None))
    rubric = rubric_of(settings) if compares else None
    suites = suites_of(settings, rubric) if rubric is not None else []
    if rubric is not None:
        require_grader(settings, rubric)
    train, asked = tasks_of(settings, data, held_out, compares=compares, names=names, python=python, read=read)
    train, of_suites = apart_from(suites, train)
    # With epochs, and for replies, there are as many steps as the rows need.
    by_steps = epochs is None and settings.training.kinds == ["grpo"]
    train, not_chosen, pool = choose_of_file(train, read.structures, settings, by_steps=by_steps)
    read.left_out.update(of_suites | not_chosen)
    if not train:
        why = f"all of {names.data} is left out: {in_one_clause(read.left_out)}"
        of = f"those of {names.held_out}, of suites, and of a class without a weight"
        raise ConfigError(names.attempted, why, f"Name other tasks: {of} are never trained on.")
    if settings.training.replay is not None:
        log.warning("training.replay: without effect: a file has no earlier rounds")
    for each in read.by_reason([*read.left_out.items(), *read.notes]):
        log.warning("%s", sentence_of(each))
    fitted = {"training": settings.training.fitted(len(train), epochs)}
    made = settings.model_copy(update=fitted).model_dump(mode="json")
    try:
        Config.model_validate(made)
    except ValidationError as error:
        hint = "The steps follow from the tasks and the epochs: set fewer warm-up steps, or a share of them below 1."
        raise ConfigError(names.attempted, explain(error, Config), hint) from None
    return RoundSpec(
        round_id=names.round_id,
        attempt=1,
        seed=settings.training.seed,
        debug=False,
        base_model=settings.model.base,
        parent=adapter_in(parent, names.attempted) if parent is not None else None,
        train=train,
        held_out=asked,
        pool=pool,
        left_out=read.left_out,
        rubric=rubric.model_dump(mode="json") if rubric is not None else {},
        settings=made,
        test=GateTest(epoch=1, number=1, alpha=alpha_of(settings.gate.alpha, 1)) if compares else None,
        suites=suites,
    )


def has_rewards(config: Config) -> bool:
    """Whether the settings say how answers are rewarded: by a rubric of their own, or by the user's agent, which may
    return numbers unless `rollout.reward` says that they do not count. Raises ConfigError."""
    rollout = config.rollout
    may_reward = isinstance(rollout.agent, AgentProgramSettings) and rollout.reward is None
    if "rubric" in config.filter.model_fields_set or rollout.weights.workflow or may_reward:
        return True
    chain = chain_of(config)
    return chain is not None and chain.judge is not None and chain.judge.custom_rubrics is not None


def base_model_of(adapter: Path, attempted: str) -> str:
    """The base model that an adapter's files name; empty if they name none. Raises ConfigError if the folder has no
    adapter that can be loaded."""
    hint = "Name the folder of a LoRA adapter with adapter_config.json and adapter_model.safetensors."
    if why := why_unloadable(adapter):
        raise ConfigError(attempted, why, hint)
    try:
        about = json.loads((adapter / "adapter_config.json").read_bytes())
        if not (adapter / "adapter_model.safetensors").is_file():
            raise ConfigError(attempted, f"{adapter} has no adapter_model.safetensors", hint)
        return str(about.get("base_model_name_or_path") or "")
    except OSError as error:
        raise ConfigError(attempted, f"{error.filename}: {error.strerror}", hint) from None
    except (ValueError, AttributeError):
        raise ConfigError(attempted, f"{adapter / 'adapter_config.json'} is no JSON object", hint) from None


def adapter_in(adapter: Path, attempted: str) -> AdapterRef:
    """The adapter in a folder, by the folder's name. Raises ConfigError if there is none that can be loaded."""
    base_model_of(adapter, attempted)
    return AdapterRef(name=adapter.name, path=str(adapter), sha256=tree_sha256(adapter))


def refuse_in_rollout(attempted: str) -> None:
    """Raises ConfigError in a process that runs the user's workflow: it may load a file that trains when it is
    loaded, and would start a round in each rollout."""
    if MARK in os.environ:
        why = "a rollout that loads the workflow's file would call it again"
        raise ConfigError(attempted, why, 'Call it below `if __name__ == "__main__":`.')


def require_packages(attempted: str = ATTEMPTED, python: Path | None = None) -> None:
    """Raises TrainError that names the packages of training that the interpreter which trains does not have."""
    python = python or trainer_python(None)
    if missing := missing_in(python, PACKAGES, attempted):
        raise TrainError(
            attempted,
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed for {python}",
            f"Run: {python} -m pip install {own_package.requirement('gpu')}, or [cpu] on a machine without a GPU, or"
            " name another interpreter in $FLYWHEEL_TRAINER_PYTHON.",
        )


def tasks_of(
    config: Config,
    train: Any,
    held_out: Any,
    *,
    compares: bool = True,
    names: RoundNames = TUNE,
    python: Path | None = None,
    read: ReadRows | None = None,
) -> tuple[list[RoundTask], list[RoundTask]]:
    """The tasks to train on, and those of the comparison or, without one, those of which SFT measures the loss.

    `train` and `held_out` are data sets: paths, objects with `path`, `name` and `split`, or mappings with these
    names; `held_out` may be a list of them. Tasks of `train` that begin as one of it does are left out. Without it,
    whole conversations of `train` are held out, and all that begin alike. `datasets` reads them in the interpreter
    `python`. What is known of the rows goes to `read`. Raises ConfigError.
    """
    read = read or ReadRows()
    python = python or trainer_python(None)
    stages = config.training.kinds
    if not compares and "grpo" in stages:
        why = "its rollouts get no rewards: there is no rubric"
        raise ConfigError(names.attempted, why, "Name one: see `flywheel docs rubrics-and-filters`.")
    if train is None:
        raise ConfigError(names.attempted, f"there is no {names.data}", "Name a file of JSON lines, one task each.")
    tasks = read_tasks([train], names.data, config, python, compares=compares, read=read)
    needed, asked = config.gate.min_tasks if compares else 0, list[RoundTask]()
    if held_out:
        several = held_out if isinstance(held_out, list) else [held_out]
        asked = read_tasks(several, names.held_out, config, python, compares=compares, read=read)
        if len(asked) < needed:
            why = f"{names.held_out} has {quantity(len(asked), 'task')}, and gate.min_tasks is {needed}"
            raise ConfigError(names.attempted, why, "Add tasks, or lower gate.min_tasks.")
    elif compares or "sft" in stages:
        groups = _alike(tasks)
        leaders = sorted(groups)
        random.Random(config.training.seed).shuffle(leaders)
        wanted = max(needed, round(len(tasks) * (1 - config.ingest.train_ratio)))
        while len(leaders) > 1 and len(asked) < wanted:
            asked += groups.pop(leaders.pop())
        if len(asked) < needed:
            why = f"{names.data} has {quantity(len(tasks), 'task')}, of which {needed} (gate.min_tasks) are held out"
            hint = f"Add tasks that begin otherwise, name an {names.held_out}, or lower gate.min_tasks."
            raise ConfigError(names.attempted, why, hint)
        tasks = [task for group in groups.values() for task in group]
    return _apart_from(asked, tasks, read), asked


def _alike(tasks: Sequence[RoundTask]) -> dict[str, list[RoundTask]]:
    """The tasks by the conversation that theirs follows, by the rule of a daemon's split, but whatever their system
    messages: the first one that begins alike, or nearly, and of the latter at most so many."""
    groups, followed, of_text = defaultdict[str, list[RoundTask]](list), dict[str, str](), dict[str, str]()
    questions, followers = Questions(), Counter[str]()
    for task in tasks:
        text, near = normalised(task.beginning), normalised(questions.nearest(task.beginning))
        if task.conversation not in followed:
            followers[near] += text not in of_text
            like = text if text in of_text or followers[near] > TEMPLATE else near
            followed[task.conversation] = of_text.get(like, task.conversation)
        of_text.setdefault(text, followed[task.conversation])
        questions.add(task.beginning)
        groups[followed[task.conversation]].append(task)
    return groups


def _apart_from(held_out: Sequence[RoundTask], tasks: Sequence[RoundTask], read: ReadRows) -> list[RoundTask]:
    """The tasks that begin as none that is held out does, whatever their system messages. Others are left out; of
    those that begin nearly as one does, this is noted."""
    same, questions, kept = dict[str, str](), Questions(), list[RoundTask]()
    for task in held_out:
        file, line = read.places[task.task_id]
        same.setdefault(normalised(task.beginning), f"line {line:,} of {file} does, which is held out")
        questions.add(task.beginning)
    for task in tasks:
        if like := same.get(normalised(task.beginning)):
            read.left_out[task.task_id] = f"it begins as {like}"
            continue
        kept.append(task)
        if near := questions.nearest(task.beginning):
            read.notes.append((task.task_id, f"it begins nearly as {same[normalised(near)]}"))
    return kept


async def train_on_files(
    spec: RoundSpec, directory: Path, config: Config, *, python: Path | None = None
) -> TuneResult:
    """Run a round in the interpreter `python`, whose files go to `directory`. A cancellation stops its worker. Raises
    TrainError."""
    tracking = config.tracking.of_round(spec.round_id, directory)
    spec = spec.model_copy(update={"settings": {**spec.settings, "tracking": tracking.model_dump(mode="json")}})
    trackers = Trackers(python or trainer_python(None))
    try:
        begin = partial(trackers.begin, directory, tracking)
        result = await run_worker(spec, directory, config, python=python, begin=begin)
        decision = decide(result.comparison, config.gate) if result.comparison is not None else None
        reason = result.reason or NOT_COMPARED if decision is None else result.explained(decision.reason)
        outcome = result.outcome if decision is None else "better" if decision.promote else "not shown to be better"
        trackers.end(directory, tracking, decision_of(outcome, reason, result.model_dump(include={"comparison"})))
    finally:
        await trackers.close()
    return TuneResult(
        adapter=Path(result.adapter.path) if result.adapter is not None else None,
        is_better=decision is not None and decision.promote,
        reason=reason,
        comparison=result.comparison,
        directory=directory,
        steps=result.steps,
        reward_first=result.reward_first,
        reward_last=result.reward_last,
        left_out=result.left_out | result.unmeasured | dict.fromkeys(result.released, RELEASED),
        partly=result.partly,
    )


async def run_worker(
    spec: RoundSpec,
    directory: Path,
    config: Config,
    *,
    python: Path | None = None,
    prepare: Callable[[], Awaitable[object]] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> RoundResult:
    """The result of a worker in the interpreter `python`, which is started after `prepare`; `begin` is called once it
    runs. A cancellation stops it. Raises TrainError.

    If the worker of an earlier command that was killed still does the same, it is waited for.
    """
    worker = next(iter(await asyncio.to_thread(WorkerProcess.strays, directory)), None)
    if worker is not None and is_of(directory, spec):
        log.info("%s: resuming with the worker of an earlier command (process %d)", spec.round_id, worker.pid)
    else:
        worker = await WorkerProcess.start(directory, spec, prepare, python=python or trainer_python(None))
    try:
        begin()
        code = await WorkerWatch(spec.round_id, worker).follow(config.daemon.round_timeout_seconds)
        return await asyncio.to_thread(result_of, directory, code, name=spec.round_id)
    except TimeoutError:
        why = f"it ran longer than {config.daemon.round_timeout_seconds:g} s"
        raise TrainError(f"finish {spec.round_id}", why, "Raise daemon.round_timeout_seconds.") from None
    finally:
        await worker.stop()


def read_tasks(
    datasets: list[Any], name: str, config: Config, python: Path, *, compares: bool, read: ReadRows | None = None
) -> list[RoundTask]:
    """The tasks of data sets, with their replies if a stage trains on them. What is known of the rows goes to `read`.
    Raises ConfigError, which names the line."""
    stages, read = {*config.training.kinds}, read or ReadRows()
    tasks: list[RoundTask] = []
    data = [DataSet.of(each) for each in datasets]
    for file, (attempted, row) in (
        (each.path, found) for each in data for found in rows([each], name, config, python)
    ):
        lacks_reply = stages == {"sft"} and not has_target(row.reply)
        # A result behind a message may be of a call in it that is not known.
        calls = any(each.get("tool_calls") or (at and each["role"] == "tool") for at, each in enumerate(row.reply))
        if lacks_reply and not calls:
            why = f"line {row.number}: it has no reply to train on"
            raise ConfigError(attempted, why, "End its `messages` with the assistant's, or give an `answer`.")
        if stages == {"dpo"} and not compares and row.worse is None:
            why = f"line {row.number}: it lacks `chosen` or `rejected`, and there is no rubric to grade rollouts"
            raise ConfigError(attempted, why, "Give each line both, or name a rubric.")
        task = read.add(row, task_of(row, config), file)
        if lacks_reply:
            read.left_out[task.task_id] = _CONTEXT
        elif "dpo" in stages and _is_tie(row, config.training.dpo.margin):
            read.left_out[task.task_id] = _TIE
        else:
            tasks.append(task)
    if not tasks:
        paths = ", ".join(each.path for each in data)
        why = f"no line can be trained on: {in_one_clause(read.left_out)}" if read.left_out else "it is empty"
        raise ConfigError(f"read {name} {paths}", why, "Name another file.")
    return tasks


def _is_tie(row: DataRow, margin: float) -> bool:
    if row.worse is None:
        return False
    is_same = said_in(row.reply) == said_in(row.worse_reply)
    return is_same or (row.difference is not None and not are_apart(row.difference, 0.0, margin))
