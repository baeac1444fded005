"""A round on files of tasks, without a daemon: `flywheel.tune` and commands run one."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections import defaultdict
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from flywheel.config import Config
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.daemon.rounds.round_tasks import round_task
from flywheel.daemon.rounds.rounds import WorkerWatch
from flywheel.daemon.rounds.worker_process import WorkerProcess, result_of
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import Comparison, GateTest, RoundSpec, RoundTask
from flywheel.sources.jsonl.record import tasks_of_file
from flywheel.training.gate.gate import alpha_of, decide

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


def run_on_files(settings: Config, train_dataset: Any, eval_dataset: Any, directory: Path) -> TuneResult:
    """Train on the tasks of a file in one round, and compare the adapter with the base model.

    `train_dataset` and `eval_dataset` are paths of JSON lines, or objects with such a `path`; without the second,
    whole conversations of the first are held out. The round's files go to `directory`. Raises ConfigError for data
    sets that cannot be used, and TrainError if the round fails.
    """
    train, held_out = tasks_of(settings, train_dataset, eval_dataset)
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
    return _run(_train(spec, directory, settings))


def require_packages() -> None:
    """Raises TrainError that names the packages of training that are not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainError(
            ATTEMPTED,
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            "Run: pip install 'agentscope-flywheel[gpu]', or 'agentscope-flywheel[cpu]' on a machine without a GPU.",
        )


def tasks_of(config: Config, train: Any, held_out: Any) -> tuple[list[RoundTask], list[RoundTask]]:
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


def _read(dataset: Any, name: str, config: Config) -> list[RoundTask]:
    path = Path(getattr(dataset, "path", dataset)).expanduser()
    tasks: dict[str, RoundTask] = {}
    for number, line in tasks_of_file(path, f"read {name} {path}"):
        task = round_task(line, config, is_accepted=False)
        key = task.task_id if task.task_id not in tasks else f"{task.task_id}-{number}"
        right = task.exchange.line or {"metadata": {"reference": line["answer"]}}
        tasks[key] = task.model_copy(update={"task_id": key, "exchange": replace(task.exchange, line=right)})
    return list(tasks.values())
