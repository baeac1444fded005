"""What a call of `flywheel.tune` does: its arguments and its files become the settings of one round, which runs."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from flywheel.config.file import Config, parse
from flywheel.config.interpolation import values_of
from flywheel.config.section import has, merged
from flywheel.config.trinity import DATASET, EPOCHS, TRINITY, is_trinitys, rows_of, settings_of
from flywheel.daemon import file_round
from flywheel.daemon.file_round import ATTEMPTED, TUNE, TuneResult
from flywheel.errors import ConfigError
from flywheel.sources.jsonl.data_set import trainer_python
from flywheel.system.python_files import parsed
from flywheel.system.signals import run_coroutine
from flywheel.system.yaml_file import read_yaml
from flywheel.training.program.program_pool import ProgramPool, program_of
from flywheel.tuner.objects import AlgorithmConfig, DatasetConfig, TunerModelConfig

log = logging.getLogger(__name__)

SAMPLING: Final = ("temperature", "top_p", "enable_thinking")
"""Fields of `TunerModelConfig` that the tuner does not hand on: defaults of them do not replace the file's."""


@dataclass(frozen=True, slots=True)
class Round:
    """The settings of the round of a call, and its data sets. `epochs` is None where `training.steps` counts.
    `origins` are the caller's keys by Flywheel's that they set."""

    settings: Config
    train: Any
    held_out: Any
    epochs: int | None
    origins: dict[str, str]


def run(given: Mapping[str, Any]) -> TuneResult:
    """Run the round of a call of `tune`, given its arguments by name. Raises ConfigError and TrainError."""
    file_round.refuse_in_rollout(ATTEMPTED)
    trainer = trainer_python(given["trainer_python"])
    file_round.require_packages(ATTEMPTED, trainer)
    made = Path(given["directory"] or f"tune-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    found = round_of(given, made, trainer)
    _check_contract(found.settings)
    data, asked = (found.origins.get(key, "").removesuffix(".path") for key in ("train_dataset.path", "eval_dataset"))
    names = replace(TUNE, data=data or TUNE.data, held_out=asked or TUNE.held_out)
    about: dict[str, Any] = {"epochs": found.epochs, "python": trainer, "names": names}
    spec = file_round.spec_of(found.settings, found.train, found.held_out, **about)
    return run_coroutine(file_round.train_on_files(spec, made, found.settings, python=trainer))


def _check_contract(settings: Config) -> None:
    """Load workflow and judge as a rollout does, in the interpreter that runs them. Raises ConfigError."""
    program = program_of(settings)
    assert program is not None
    pool = ProgramPool(program, workers=1)
    try:
        pool.start()
    finally:
        pool.close()


def round_of(given: Mapping[str, Any], directory: Path, trainer: Path) -> Round:
    """What the arguments of a call mean, of which those that are None or absent say nothing: they win over `config`,
    and `config` over the file. Raises ConfigError, which names the key."""
    given = {key: value for key, value in given.items() if value is not None}
    file, more = _read(given.get("config_path")), _read(given.get("config"))
    name, folder = (file.name, file.folder) if "config_path" in given else (more.name, more.folder)
    if "train_dataset" in given:
        # How long it is trained on is said by the data set as well.
        _section(file.settings, "training").pop("steps", None)
    # Workflow and judge give the reward, unless `config` says otherwise.
    both: dict[str, Any] = {"rollout": {"reward": {"rubric": 0, "workflow": 1}}}
    if file.is_trinitys or more.is_trinitys:
        both["train_dataset"] = {"total_epochs": EPOCHS}
    origins: dict[str, str] = {}
    arguments, by_arguments = _arguments(given)
    for part, by_part in (
        (file.settings, file.origins),
        (more.settings, more.origins),
        (arguments, by_arguments),
    ):
        both = merged(both, part)
        # What Flywheel's own keys set again has its own name.
        origins = {key: name for key, name in origins.items() if not has(part, key)}
        origins |= {key: name for key, name in by_part.items() if has(part, key)}
    if monitor := both.pop("monitor_type", None):
        both = merged(both, {"tracking": {"report_to": [monitor], "dir": str(directory / "tensorboard")}})
    train, held_out = both.pop("train_dataset", {}), both.pop("eval_dataset", None)
    if "eval_dataset" in given:
        # Its lines are read as those of `train_dataset`: the argument does not say which key has the question.
        held_out = [{**train, **each} for each in held_out]
    epochs = None if "steps" in _section(both, "training") else train.get("total_epochs")
    settings = _settings(both, given, name, folder, trainer, origins)
    return Round(settings, train if train.get("path") else None, held_out, epochs, origins)


class _Read(NamedTuple):
    """Settings in Flywheel's keys, their name, and the folder that their paths are relative to."""

    settings: dict[str, Any]
    name: str
    folder: Path
    is_trinitys: bool
    origins: dict[str, str]


def _read(config: Config | Mapping[str, Any] | str | Path | None) -> _Read:
    name, folder, raw = "the settings", Path.cwd(), dict[str, Any]()
    if isinstance(config, str | Path):
        path = Path(config).expanduser().absolute()
        name, attempted = str(path), f"read configuration {path}"
        raw = values_of(read_yaml(path, attempted, "Name a YAML file.", keys_once=True), attempted) or {}
        # Those of Trinity's files are relative to the working directory there.
        folder = folder if is_trinitys(raw) else path.parent
    elif isinstance(config, Config):
        raw = config.model_dump(mode="json", exclude_unset=True)
    elif config is not None:
        raw = dict(config)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"use configuration {name}", "its root is no mapping", "Start with `training:`.")
    rows, own = rows_of(raw)
    # A file may have the same setting by both names: Flywheel's wins.
    origins = {row.use: row.place for row in rows if row.use and not has(own, row.use)}
    return _Read(merged(settings_of(rows, name), own), name, folder, is_trinitys(raw), origins)


def _arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that the arguments have, and the fields that set them. Raises ConfigError."""
    found: list[tuple[str, str, Any]] = [(key, key, given.get(key)) for key in ("project_name", "experiment_name")]
    for name, kind in (("model", TunerModelConfig), ("algorithm", AlgorithmConfig), ("train_dataset", DatasetConfig)):
        found += _fields(given.get(name), name, kind)
    rows = TRINITY.rows(found)
    made = settings_of(rows, "the arguments")
    base = _section(made, "model").get("base")
    if base and Path(base).expanduser().is_dir():
        # Not relative to the file.
        made["model"]["base"] = str(Path(base).expanduser().absolute())
    if models := given.get("auxiliary_models"):
        others = {name: _auxiliary(name, each) for name, each in models.items()}
        made = merged(made, {"rollout": {"auxiliary_models": others}})
    # The subset and the split of another data set do not belong to one.
    alone = {"name": None, "split": None}
    if "train_dataset" in given:
        made["train_dataset"] = {**alone, **made.get("train_dataset", {})}
    if "eval_dataset" in given:
        asked = TRINITY.rows(_fields(given["eval_dataset"], "eval_dataset", DatasetConfig))
        made["eval_dataset"] = [{**alone, **settings_of(asked, "the arguments").get("train_dataset", {})}]
    if "monitor_type" in given:
        made["monitor_type"] = given["monitor_type"]
    return made, {row.use: row.place for row in rows if row.use}


def _fields(given: Any, name: str, kind: type[BaseModel]) -> Iterator[tuple[str, str, Any]]:
    """The fields of an argument, which is an object of the tuner, a mapping, or the only field that one needs: each
    with its place, its name for the tuner, and its value. Raises ConfigError."""
    if isinstance(given, str | Path):
        given = {"model_path" if kind is TunerModelConfig else "path": str(given)}
    if not isinstance(values := given or {}, Mapping):
        values = {**getattr(given, "model_dump", lambda: vars(given))()}
    if unknown := [key for key in values if key not in kind.model_fields]:
        why = f"unknown setting `{unknown[0]}`; known here: {', '.join(kind.model_fields)}"
        raise ConfigError(f"use the {name}", why, "See `flywheel docs migrate`.")
    is_set = getattr(given, "model_fields_set", values)
    for key, value in values.items():
        if key not in SAMPLING or key in is_set:
            yield f"{name}.{key}", DATASET[key] if kind is DatasetConfig else key, value


def _auxiliary(name: str, given: Any) -> Any:
    if isinstance(given, Mapping) and "base_url" in given:
        return dict(given)
    raise ConfigError(
        f"use auxiliary_models[{name!r}]",
        "a round starts no engines for other models",
        f"Serve it, for example with `vllm serve`, and pass {{{name!r}: {{'base_url': URL, 'model': NAME}}}}.",
    )


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is no mapping is reported when all settings are checked."""
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def _settings(
    both: dict[str, Any], given: Mapping[str, Any], name: str, folder: Path, trainer: Path, origins: Mapping[str, str]
) -> Config:
    """All settings, checked. Raises ConfigError, which names the key as the caller does."""
    rollout = _section(both, "rollout")
    longest, whole = rollout.get("max_completion_tokens"), rollout.get("max_model_len")
    if isinstance(longest, int) and isinstance(whole, int) and longest >= whole:
        # The tuner's default is more than most contexts hold.
        log.warning("%s: max_tokens %d: without effect: max_model_len is %d", name, longest, whole)
        del rollout["max_completion_tokens"]
    agent = rollout.get("agent")
    rollout["agent"] = {
        # The workflow has what it needs in the interpreter of the caller.
        **({"python": sys.executable} if trainer != Path(sys.executable) else {}),
        **(agent if isinstance(agent, Mapping) else {}),
        "workflow": _spec_of(given["workflow_func"]),
        "folder": str(Path.cwd()),
    }
    if "judge_func" in given:
        rollout["reward_function"] = _spec_of(given["judge_func"])
    # Nothing is read from a source: without this, Studio's database would have to exist.
    both.setdefault("sources", [])
    return parse(both, name, folder, names=origins)


def _spec_of(function: Callable[..., Any] | str) -> str:
    """`FILE.py:function`. Raises ConfigError for a function that no other process can load."""
    if isinstance(function, str):
        named = parsed(function)
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
