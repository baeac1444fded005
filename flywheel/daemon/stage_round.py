"""A round of one stage on a file or rows: `flywheel.sft`, `flywheel.dpo`, `flywheel.grpo` and `flywheel train`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args

from flywheel.config.file import Config, parse
from flywheel.config.interpolation import values_of
from flywheel.config.section import GivenSetting, has, merged
from flywheel.config.training import Stage
from flywheel.daemon import file_round
from flywheel.daemon.file_round import RoundNames, TuneResult
from flywheel.daemon.rounds.file_tasks import ReadRows
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import RoundSpec
from flywheel.system.files import expanded, tidied
from flywheel.system.yaml_file import read_yaml
from flywheel.training.data.round_directory import changes, is_of

log = logging.getLogger(__name__)

SHORT: Final[Mapping[str, tuple[str, str, str]]] = {
    "base_model": ("model.base",) * 3,
    "epochs": ("training.sft.epochs", "training.dpo.epochs", ""),
    "steps": ("", "", "training.steps"),
    "batch_size": ("training.sft.batch_size", "training.dpo.batch_size", "training.prompts_per_step"),
    "learning_rate": ("training.sft.learning_rate", "training.dpo.learning_rate", "training.learning_rate"),
    "warmup": ("training.sft.warmup_steps", "training.dpo.warmup_steps", "training.warmup_steps"),
    "num_samples": ("", "training.group_size", "training.group_size"),
    "beta": ("", "training.dpo.beta", "training.beta"),
    "max_length": ("rollout.max_model_len",) * 3,
    "task_weights": ("training.task_weights",) * 3,
    "seed": ("training.seed",) * 3,
    "rubric": ("filter.rubric",) * 3,
}
"""The setting of SFT, of DPO and of GRPO that an argument is short for; empty where there is none."""
FILES: Final = ("eval_data", "output", "sft_model", "config")
"""Arguments that are no settings."""
_UNUSED: Final[Mapping[str, Any]] = {"sources": [], "targets": {}}
"""Nothing is read from a source, and the base model is trained for no target."""
_SECTIONS: Final = Config.model_fields.keys() - _UNUSED.keys()
Called = Callable[[str], str]
_PATHS: Final = ("output", "sft_model", "config", "rubric")


@dataclass(frozen=True, slots=True)
class StageRound:
    """A round that is ready to run.

    Attributes:
        output: The folder that the adapter is copied to.
        directory: That of the round's own files, beside it.
        read: What is known of the rows of the data.
    """

    spec: RoundSpec
    settings: Config
    output: Path
    directory: Path
    read: ReadRows

    async def run(self) -> TuneResult:
        """Train, in a worker that a cancellation stops. Raises TrainError."""
        made = await file_round.train_on_files(self.spec, self.directory, self.settings)
        if made.adapter is None:
            return made
        try:
            shutil.copytree(made.adapter, self.output, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            hint = f"It is in {made.adapter}."
            raise TrainError(f"copy the adapter to {self.output}", why, hint) from None
        return replace(made, adapter=self.output)


def prepare(
    stage: Stage, data: Any, given: Mapping[str, Any], *, single: Sequence[str] = (), called: Called = str
) -> StageRound:
    """The round of a stage on `data`, which is a data set as in `tasks_of`, or rows.

    `given` are arguments by name, of which those that are None say nothing: those of `SHORT` and `FILES`, and
    sections of the settings as mappings. Above them are `single` settings as KEY=VALUE. In messages, an argument has
    the name by which it is `called`. Raises ConfigError and TrainError.
    """
    attempted = f"train with {stage}"
    file_round.refuse_in_rollout(attempted)
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(given.get("model"), str | Path):
        if "base_model" in given:
            why = "model is another name of base_model, and both are given"
            raise ConfigError(attempted, why, "Give one of them.")
        given["base_model"] = given.pop("model")
    at = get_args(Stage).index(stage)
    short = {name: keys[at] for name, keys in SHORT.items() if keys[at]}
    # That of GRPO is no setting: its steps follow from the tasks.
    epochs = given.pop("epochs", None) if stage == "grpo" else None
    has_steps = "steps" in given or any(has(GivenSetting.of(each).put_into({}), "training.steps") for each in single)
    if epochs is not None and (has_steps or not isinstance(epochs, int) or epochs < 1):
        hint = (
            f"Give a whole number from 1, without {called('steps')} (training.steps), which follows from the epochs."
        )
        raise ConfigError(attempted, f"{called('epochs')} is {epochs}", hint)
    sections = {key for key in given if key in _SECTIONS and isinstance(given[key], Mapping)}
    if unknown := given.keys() - {*short, *FILES, *sections}:
        why = f"there is no argument `{min(unknown)}`"
        known = ", ".join(sorted({"data", "epochs", *FILES, *short}))
        raise ConfigError(attempted, why, f"Arguments are {known}, and sections of the settings as mappings.")
    given.setdefault("output", f"{stage}-{datetime.now():%Y%m%d-%H%M%S}")
    given |= {name: _path(given[name], attempted, called(name)) for name in _PATHS if name in given}
    _require_empty(given["output"], attempted, called("output"))
    parent = given.get("sft_model")
    if parent is not None and (base := file_round.base_model_of(parent, attempted)):
        given.setdefault("base_model", base)
    share = given.get("warmup", 0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        why = f"{called('warmup')} is {share}: it is the share of all steps in which the learning rate rises"
        hint = f"Give a number from 0 to below 1, or a number of steps as the setting {short['warmup']}."
        raise ConfigError(attempted, why, hint)
    settings = _settings(stage, given, short, single, called)
    if settings.training.kinds != [stage]:
        why = f"by --set, training.stages is [{', '.join(settings.training.kinds)}]"
        raise ConfigError(attempted, why, "Leave it out, and name settings of `training` one by one.")
    if "base" not in settings.model.model_fields_set:
        why = f"there is no base model: neither {called('base_model')} nor model.base names one"
        raise ConfigError(attempted, why, "Name a folder, or a model of the Hub.")
    names, read = RoundNames(stage, attempted, called("data"), called("eval_data")), ReadRows()
    about: dict[str, Any] = {"parent": parent, "names": names, "epochs": epochs, "read": read}
    held_out, compares = [given["eval_data"]] if "eval_data" in given else None, file_round.has_rewards(settings)
    spec = file_round.spec_of(settings, data, held_out, compares=compares, **about)
    file_round.require_packages(attempted)
    return StageRound(spec, settings, given["output"], _round_directory(given["output"], spec), read)


def _settings(
    stage: Stage, given: Mapping[str, Any], short: Mapping[str, str], single: Sequence[str], called: Called
) -> Config:
    """The settings of the file `config`, with the arguments above them. Raises ConfigError."""
    name, folder, raw = f"of {stage}", Path.cwd(), dict[str, Any]()
    if "config" in given:
        file: Path = given["config"]
        name, folder, attempted = f"{file} with the arguments {name}", file.parent, f"read configuration {file}"
        raw = values_of(read_yaml(file, attempted, "Name a YAML file.", keys_once=True), attempted) or {}
    options = {key: given[argument] for argument, key in short.items() if argument in given}
    options["training.stages"] = [stage]
    if "rubric" in given:
        # That of a chain would take its place.
        options["filter.chain"] = None
    base = given.get("base_model")
    if isinstance(base, str | Path):
        # Not relative to the configuration file, as its own paths are.
        options["model.base"] = str(Path(base).absolute() if Path(base).is_dir() else base)
    if isinstance(raw, dict):
        sections = {key: value for key, value in given.items() if key in _SECTIONS}
        raw = {**merged(raw, sections), **_UNUSED}
        for key, value in options.items():
            # What stands in the place of a section is refused below.
            with contextlib.suppress(ConfigError):
                raw = GivenSetting(key, value).put_into(raw)
    names = {key: called(argument) for argument, key in short.items() if argument in given}
    return parse(raw, name, folder, given=single, names=names)


def _path(value: Any, attempted: str, name: str) -> Path:
    try:
        return tidied(expanded(Path(value)).absolute())
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(attempted, f"{name}: {error}", "Name a file or a folder.") from None


def _require_empty(output: Path, attempted: str, name: str) -> None:
    """Raises ConfigError if the folder of the adapter has files already."""
    try:
        if not output.exists() or not any(output.iterdir()):
            return
        why = f"{output} is not empty"
    except OSError as error:
        why = f"{output} cannot be used: {error.strerror}"
    raise ConfigError(attempted, f"{name}: {why}", "Name a new folder.")


def _round_directory(output: Path, spec: RoundSpec) -> Path:
    """A folder beside that of the adapter for the round's files: that of an earlier run, if it was stopped and did
    the same, else a new one."""
    names = itertools.chain([".round"], (f".round-{number}" for number in itertools.count(2)))
    folders = (output.with_name(output.name + name) for name in names)
    about = ""
    for folder in folders:
        if not folder.exists():
            if about:
                log.warning("it starts over: %s", about)
            return folder
        if is_of(folder, spec):
            log.info("it goes on with the round in %s", folder)
            return folder
        if changed := changes(folder, spec):
            about = f"since the unfinished round in {folder}, these have changed: {changed}"
    raise AssertionError("names have no end")
