"""The suites of the settings (`gate.suites`): their tasks, whether these are enough, and what they keep out of
training."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from flywheel.config.file import Config
from flywheel.config.training import SuiteSettings
from flywheel.daemon.judging.judge_setup import check_independence
from flywheel.daemon.rounds.file_tasks import rows, task_of
from flywheel.errors import ConfigError
from flywheel.judge.client import require_judge
from flywheel.judge.filters.chain import chain_of
from flywheel.judge.rubric.file import load_rubric
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.round import RoundTask, Suite
from flywheel.records.similarity import NEAR, jaccard, numbers, words
from flywheel.sources.jsonl.data_set import DataSet, trainer_python
from flywheel.system.terminal import quantity
from flywheel.training.gate.gate import power_on_suite
from flywheel.training.optim.rollout_grading import has_judge

MIN_POWER: Final = 0.5
"""Smallest probability with which a candidate that is as good must pass a suite."""


def suites_of(config: Config, rubric: Rubric) -> list[Suite]:
    """The suites of the settings, graded by `rubric` unless they have their own.

    Raises ConfigError for a file or rubric that cannot be used, and for a suite with a margin and too few tasks.
    """
    found = []
    for name, tasks in tasks_of_suites(config).items():
        given, own = config.gate.suites[name], rubric
        if given.rubric is not None:
            own = load_rubric(given.rubric, config.correction("gate", "suites", name, "rubric"))
            check_independence(config, own)
            require_grader(config, own)
        found.append(Suite(name=name, tasks=tasks, rubric=own.model_dump(mode="json"), margin=given.margin))
    return found


def require_grader(config: Config, rubric: Rubric) -> None:
    """Raise ConfigError if the answers of a round are graded by a judge, and the settings do not say by which, or
    switch it off."""
    if not has_judge(config):
        return
    chain = chain_of(config)
    if chain is not None and chain.decides and "rubric" not in config.filter.model_fields_set:
        raise ConfigError(
            "reward the answers of a round",
            f"{config.filter.chain} has no enabled `llm_evaluate`, and no judge for rounds",
            "Set `task_judge.judge_protocol` with a workflow in it, enable `llm_evaluate`, or set filter.rubric.",
        )
    require_judge(rubric, config.judge)


def tasks_of_suites(config: Config) -> dict[str, list[RoundTask]]:
    """The tasks of each suite by its name. Raises ConfigError as `suites_of` does for its file and size."""
    found = {}
    for name, given in config.gate.suites.items():
        found[name] = _tasks(name, given, config)
        _check_power(name, given, found[name], config)
    return found


def _tasks(name: str, given: SuiteSettings, config: Config) -> list[RoundTask]:
    key = f"gate.suites.{name}"
    tasks: dict[str, RoundTask] = {}
    for _, row in rows([DataSet.of(given.file)], f"{key}.file", config, trainer_python(None)):
        task = task_of(row, config)
        task_id = f"{name}/{task.task_id}"
        while task_id in tasks:
            task_id += f"-{row.number}"
        tasks[task_id] = task.model_copy(update={"task_id": task_id, "suite": name})
    if not tasks:
        hint = config.correction("gate", "suites", name, "file")
        raise ConfigError(f"read {key}.file {given.file}", "it is empty", hint)
    return list(tasks.values())


def _check_power(name: str, given: SuiteSettings, tasks: Sequence[RoundTask], config: Config) -> None:
    """Raise ConfigError for a suite on which a candidate that is as good would probably be rejected."""
    if (margin := given.margin) is None:
        return
    # A worker asks the same prompt once.
    asked = {repr((task.prompt, task.exchange.tools, task.line)): task for task in tasks}.values()
    conversations = len({task.conversation for task in asked})
    if (power := power_on_suite(conversations, len(asked), margin, config.gate)) >= MIN_POWER:
        return
    larger = range(conversations + 1, sys.maxsize)
    needed = larger[bisect_left(larger, MIN_POWER, key=lambda n: power_on_suite(n, n, margin, config.gate))]
    raise ConfigError(
        f"use gate.suites.{name}",
        f"{given.file} has {quantity(conversations, 'different conversation')}, and {needed:,} are needed:"
        f" with the margin {margin:g}, an equally good candidate would pass {power:.0%} of the time, not"
        f" {MIN_POWER:.0%}",
        "Add tasks or raise the margin. Without a margin, the suite is reported and blocks nothing.",
    )


def apart_from(suites: Iterable[Suite], tasks: Iterable[RoundTask]) -> tuple[list[RoundTask], dict[str, str]]:
    """The tasks that may be trained on, and the others by id, with the reason: those whose first user message is
    nearly that of a suite's task, with the same numbers."""
    # Exactly, not by bands: a suite is small enough, and bands miss a few pairs.
    of_suites = defaultdict[tuple[str, ...], list[tuple[frozenset[int], str]]](list)
    for each in (task for suite in suites for task in suite.tasks):
        text = each.beginning
        of_suites[numbers(text)].append((words(text), each.task_id))
    kept, left_out = [], {}
    for task in tasks:
        text = task.beginning
        similar = of_suites.get(numbers(text), [])
        own = words(text) if similar else frozenset[int]()
        near = next((task_id for others, task_id in similar if jaccard(own, others) >= NEAR), None)
        if near is None:
            kept.append(task)
        else:
            left_out[task.task_id] = f"it begins almost like {near}, a task of gate.suites"
    return kept, left_out
