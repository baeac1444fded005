"""`flywheel.tune`: one round on a file of tasks, without a daemon, for people who come from AgentScope's tuner."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from flywheel.config import Config, parse
from flywheel.config.section import merged
from flywheel.config.trinity import from_tuner
from flywheel.daemon.file_round import ATTEMPTED, TuneResult, require_packages, run_on_files
from flywheel.errors import ConfigError
from flywheel.system.yaml_file import read_yaml
from flywheel.training.program import agent_program
from flywheel.training.program.program_child import MARK

__all__ = ["TuneResult", "tune"]


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
    require_packages()
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
    return run_on_files(settings, train_dataset, eval_dataset, made)


def _settings(given: Any, name: str, single: str = "") -> dict[str, Any]:
    """Settings of an object of AgentScope's tuner, a mapping, or a `single` value, in Flywheel's keys."""
    if given is None:
        return {}
    if isinstance(given, str | Path) and single:
        return from_tuner({single: str(given)}, (), f"the {name}")
    values = given if isinstance(given, Mapping) else {**getattr(given, "model_dump", lambda: vars(given))()}
    found = from_tuner(values, (), f"the {name}")
    if unknown := [key for key in found if key not in Config.model_fields]:
        raise ConfigError(f"use the {name}", f"unknown setting `{unknown[0]}`", "See `flywheel docs workflows`.")
    rollout = found.get("rollout", {})
    longest = rollout.get("max_completion_tokens")
    if longest is not None and longest >= rollout.get("max_model_len", longest + 1):
        # The tuner's default is more than most contexts hold.
        del rollout["max_completion_tokens"]
    return found


def _monitor(kind: str | None, directory: Path) -> dict[str, Any]:
    return {"tracking": {"report_to": [kind], "dir": str(directory / "tensorboard")}} if kind else {}


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
    both = merged(given, from_tuner(raw, Config.model_fields.keys(), name))
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
        named = agent_program.parsed(function)
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
