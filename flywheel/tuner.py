"""`flywheel.tune`: one round on a file of tasks, without a daemon, for people who come from AgentScope's tuner."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from flywheel.config import Config, parse
from flywheel.config.tuner import merged, translated
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds.round_tasks import round_task
from flywheel.daemon.rounds.rounds import WorkerWatch
from flywheel.daemon.rounds.worker_process import WorkerProcess, result_of
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import Comparison, GateTest, RoundSpec, RoundTask
from flywheel.sources.jsonl.record import tasks_of_file
from flywheel.system.yaml_file import read_yaml
from flywheel.training.gate.alpha_spending import alpha_of
from flywheel.training.gate.gate import decide
from flywheel.training.program import function_name
from flywheel.training.program.program_child import MARK

ATTEMPTED: Final = "tune the workflow"
PACKAGES: Final = ("torch", "transformers", "trl", "peft", "ray", "vllm")
ROUND_ID: Final = "tune"


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What a round made.

    Attributes:
        adapter: The directory of the trained LoRA adapter; None if the round was refused.
        is_better: Whether the adapter is shown to be better than the base model on the held-out tasks.
        reason: Why it is or is not, or why the round was refused.
        comparison: The figures of that.
        directory: The files of the round: `metrics.jsonl`, `rollouts.jsonl`, `worker.log` and others.
        reward_first, reward_last: Mean rewards of the first and the last step.
    """

    adapter: Path | None
    is_better: bool
    reason: str
    comparison: Comparison | None
    directory: Path
    steps: int
    reward_first: float | None
    reward_last: float | None


def tune(
    workflow_func: Callable[..., Any] | str,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    judge_func: Callable[..., Any] | str | None = None,
    model: Any = None,
    auxiliary_models: Mapping[str, Any] | None = None,
    algorithm: Any = None,
    monitor_type: str | None = None,
    directory: str | Path | None = None,
) -> TuneResult:
    """Train a LoRA adapter of a workflow's model in one round, and compare it with the base model.

    Args:
        workflow_func: An async function by the contract of AgentScope's tuner, defined in a file, or
            `FILE.py:function`.
        config: Settings as a mapping or a YAML file, in Flywheel's keys, or those of the tuner (`repeat_times`,
            `batch_size`, …) or of a Trinity file.
        train_dataset: A file of JSON lines, one task each, or an object with such a `path`.
        eval_dataset: The same for the tasks of the comparison. Default: whole conversations of the others, until
            they have the share that `ingest.train_ratio` leaves (30 of 100 tasks), and at least `gate.min_tasks`.
        judge_func: A function that rewards the workflow's response.
        model: The base model's path or name, or a `TunerModelConfig`.
        auxiliary_models: Further models by name, each with `base_url`, `model` and perhaps `api_key_env`.
        algorithm: An `AlgorithmConfig`, or a mapping with its names.
        monitor_type: `tensorboard` writes event files for it as well, to the folder `tensorboard` of the directory.
        directory: Where the round's files go. Default: a new folder in the working directory.

    Raises ConfigError for wrong settings, a wrong data set or a wrong function, and TrainError if the round fails.
    """
    if MARK in os.environ:
        why = "it is called again while a rollout loads the file of the workflow"
        raise ConfigError(ATTEMPTED, why, 'Call it below `if __name__ == "__main__":`.')
    _require_packages()
    made = Path(directory or f"tune-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    given: dict[str, Any] = {"rollout": {"reward": {"rubric": 0, "workflow": 1}}}
    for part in (
        _settings(model, "model", "model_path"),
        _settings(algorithm, "algorithm"),
        {"rollout": {"auxiliary_models": dict(auxiliary_models)}} if auxiliary_models else {},
        _monitor(monitor_type, made),
    ):
        given = merged(given, part)
    settings = _config(config, given, _spec_of(workflow_func), judge_func and _spec_of(judge_func))
    train, held_out = _tasks(settings, train_dataset, eval_dataset)
    spec = RoundSpec(
        round_id=ROUND_ID,
        attempt=1,
        seed=settings.training.seed,
        debug=False,
        base_model=settings.model.base,
        parent=None,
        train=train,
        held_out=held_out,
        rubric=rubric_of(settings).model_dump(mode="json"),
        settings=settings.model_dump(mode="json"),
        test=GateTest(epoch=1, number=1, alpha=alpha_of(settings.gate.alpha, 1)),
    )
    return _run(_train(spec, made, settings))


def _run(work: Coroutine[Any, Any, TuneResult]) -> TuneResult:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # In a notebook, whose cells run in a loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _train(spec: RoundSpec, directory: Path, config: Config) -> TuneResult:
    worker = await WorkerProcess.start(directory, spec)
    try:
        code = await WorkerWatch(ROUND_ID, worker).follow(config.daemon.round_timeout_seconds)
        result = await asyncio.to_thread(result_of, directory, code)
    except TimeoutError:
        why = f"it ran longer than {config.daemon.round_timeout_seconds:g} s"
        raise TrainError(ATTEMPTED, why, "Raise daemon.round_timeout_seconds.") from None
    finally:
        await worker.stop()
    decision = decide(result.comparison, config.gate) if result.comparison is not None else None
    return TuneResult(
        adapter=Path(result.adapter.path) if result.adapter is not None else None,
        is_better=decision is not None and decision.promote,
        reason=decision.reason if decision is not None else result.reason,
        comparison=result.comparison,
        directory=directory,
        steps=result.steps,
        reward_first=result.reward_first,
        reward_last=result.reward_last,
    )


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainError(
            ATTEMPTED,
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            "Run: pip install 'agentscope-flywheel[gpu]', or 'agentscope-flywheel[cpu]' on a machine without a GPU.",
        )


def _settings(given: Any, name: str, single: str = "") -> dict[str, Any]:
    """Settings of an object of AgentScope's tuner, a mapping, or a `single` value, in Flywheel's keys."""
    if given is None:
        return {}
    if isinstance(given, str | Path) and single:
        return translated({single: str(given)}, (), f"the {name}")
    values = given if isinstance(given, Mapping) else {**getattr(given, "model_dump", lambda: vars(given))()}
    found = translated(values, (), f"the {name}")
    if unknown := [key for key in found if key not in Config.model_fields]:
        raise ConfigError(f"use the {name}", f"unknown setting `{unknown[0]}`", "See `flywheel docs workflows`.")
    rollout = found.get("rollout", {})
    longest = rollout.get("max_completion_tokens")
    if longest is not None and longest >= rollout.get("max_model_len", longest + 1):
        # The tuner's default is more than most contexts hold.
        del rollout["max_completion_tokens"]
    return found


def _monitor(kind: str | None, directory: Path) -> dict[str, Any]:
    if kind not in (None, "tensorboard"):
        why = f"`monitor_type` is {kind}, and rounds write metrics.jsonl and files for TensorBoard"
        raise ConfigError(ATTEMPTED, why, "Use tensorboard, or read metrics.jsonl.")
    return {"training": {"tensorboard": str(directory / "tensorboard")}} if kind else {}


def _config(
    config: Config | Mapping[str, Any] | str | Path | None, given: dict[str, Any], workflow: str, judge: str | None
) -> Config:
    """All settings together. Raises ConfigError, which names the key."""
    name, folder, raw = "the settings", Path.cwd(), dict[str, Any]()
    if isinstance(config, str | Path):
        path = Path(config).expanduser().absolute()
        name, folder = str(path), path.parent
        raw = read_yaml(path, f"read configuration {path}", "Name a YAML file.", keys_once=True).value or {}
    elif isinstance(config, Config):
        raw = config.model_dump(mode="json", exclude_unset=True)
    elif config is not None:
        raw = dict(config)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"use configuration {name}", "its root is no mapping", "Start with `training:`.")
    both = merged(given, translated(raw, Config.model_fields.keys(), name))
    agent = both.setdefault("rollout", {}).get("agent")
    own = {"workflow": workflow, "folder": str(Path.cwd())}
    both["rollout"]["agent"] = {**(agent if isinstance(agent, Mapping) else {}), **own}
    if judge is not None:
        both["rollout"]["reward_function"] = judge
    # Nothing is read from a source: without this, Studio's database would have to exist.
    both.setdefault("sources", [])
    return parse(both, name, folder)


def _spec_of(function: Callable[..., Any] | str) -> str:
    """`FILE.py:function`. Raises ConfigError for a function that no other process can load."""
    if isinstance(function, str):
        named = function_name.parsed(function)
        if named is None or not named.is_in_file:
            return function
        return str(named._replace(where=str(Path(named.where).expanduser().absolute())))
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:
        file = ""
    if not name.isidentifier() or not Path(file).is_file():
        why = f"{name} is not a function of a file: other processes cannot load it"
        raise ConfigError(ATTEMPTED, why, "Define it with `async def` at the top level of a .py file.")
    return f"{Path(file).absolute()}:{name}"


def _tasks(config: Config, train: Any, held_out: Any) -> tuple[list[RoundTask], list[RoundTask]]:
    """The tasks to train on, and those of the comparison. Raises ConfigError."""
    if train is None:
        raise ConfigError(ATTEMPTED, "there is no train_dataset", "Name a file of JSON lines, one task each.")
    tasks, needed = _read(train, "train_dataset", config), config.gate.min_tasks
    if held_out is not None:
        asked = _read(held_out, "eval_dataset", config)
        if len(asked) < needed:
            why = f"eval_dataset has {len(asked)} tasks, and gate.min_tasks is {needed}"
            raise ConfigError(ATTEMPTED, why, "Add tasks, or lower gate.min_tasks.")
        return tasks, asked
    # Whole conversations, as in a daemon: tasks of one are not independent.
    by_conversation = defaultdict[str, list[RoundTask]](list)
    for task in tasks:
        by_conversation[task.conversation].append(task)
    conversations = sorted(by_conversation)
    random.Random(config.training.seed).shuffle(conversations)
    wanted, asked_for = max(needed, round(len(tasks) * (1 - config.ingest.train_ratio))), list[RoundTask]()
    while conversations and len(asked_for) < wanted:
        asked_for += by_conversation.pop(conversations.pop())
    left = [task for task in tasks if task.conversation in by_conversation]
    if len(asked_for) < needed or not left:
        why = f"train_dataset has {len(tasks)} tasks, of which {needed} (gate.min_tasks) are held out"
        raise ConfigError(ATTEMPTED, why, "Add tasks, name an eval_dataset, or lower gate.min_tasks.")
    return left, asked_for


def _read(dataset: Any, name: str, config: Config) -> list[RoundTask]:
    path = Path(getattr(dataset, "path", dataset)).expanduser()
    tasks: dict[str, RoundTask] = {}
    for number, line in tasks_of_file(path, f"read {name} {path}"):
        task = round_task(line, config, is_accepted=False)
        key = task.task_id if task.task_id not in tasks else f"{task.task_id}-{number}"
        tasks[key] = task.model_copy(update={"task_id": key, "reference": task.reference or line["answer"]})
    return list(tasks.values())
