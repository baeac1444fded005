"""The whole configuration: one YAML file, strict, with units in the names.

Each field's docstring is its documentation (`scripts/configuration_page.py` makes the page). An unknown key is an
error that names the key's path. Secrets are never in the file: it names environment variables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from flywheel.config.agentjet import translated
from flywheel.config.ingest import (
    IngestSettings,
    JsonlSource,
    ModelFilter,
    OtlpSource,
    SourceSettings,
    StudioSource,
)
from flywheel.config.judge import FilterSettings, JudgeSettings
from flywheel.config.section import Section, UserPath
from flywheel.config.serving import DaemonSettings, ServingSettings
from flywheel.config.training import (
    GateSettings,
    ModelSettings,
    RaySettings,
    RetentionSettings,
    RolloutSettings,
    TrainingSettings,
    TriggerSettings,
)
from flywheel.errors import ConfigError
from flywheel.exclusion import TrainedModels
from flywheel.files import expanded, tidied
from flywheel.yaml_file import YamlDocument, explain, read_yaml


class StateSettings(Section):
    dir: UserPath | None = None
    """Where Flywheel keeps its own state: `state.db`, `tasks.jsonl`, rounds and adapters. Default: `$FLYWHEEL_HOME`,
    else `flywheel` under the XDG state directory."""


def _studio() -> list[SourceSettings]:
    return [StudioSource()]


class Config(Section):
    state: StateSettings = StateSettings()
    sources: list[SourceSettings] = Field(default_factory=_studio)
    """What to watch. Default: Studio's own place for its database."""
    ingest: IngestSettings = IngestSettings()
    judge: JudgeSettings = JudgeSettings()
    filter: FilterSettings = FilterSettings()
    trigger: TriggerSettings = TriggerSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    rollout: RolloutSettings = RolloutSettings()
    gate: GateSettings = GateSettings()
    serving: ServingSettings = ServingSettings()
    ray: RaySettings = RaySettings()
    retention: RetentionSettings = RetentionSettings()
    daemon: DaemonSettings = DaemonSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.training.lora.r > self.serving.max_lora_rank:
            raise ValueError(
                f"training.lora.r {self.training.lora.r} is above serving.max_lora_rank {self.serving.max_lora_rank}:"
                " the server would not take what a round trains"
            )
        waited_for, needed = self.trigger.min_held_out, self.gate.min_tasks
        if waited_for is not None and waited_for < needed:
            raise ValueError(
                f"trigger.min_held_out {waited_for} is below gate.min_tasks {needed}: a round could start that can"
                " only be rejected"
            )
        return self

    def models_of(self, source: SourceSettings | None) -> TrainedModels:
        """Which models' replies of a source are trained on; None is one that is in the configuration no more."""
        chosen = source.models if source is not None else ModelFilter()
        return TrainedModels(self.model.alias, self.model.base, tuple(chosen.include), tuple(chosen.exclude))

    @property
    def state_dir(self) -> Path:
        return self.state.dir or default_state_dir()

    @property
    def task_file(self) -> Path:
        return self.ingest.output or self.state_dir / "tasks.jsonl"


def source_at(config: Config, file: Path) -> Path | None:
    """The source that reads this file, if one does: nothing may be appended to it."""
    # A link is read by its own name, and what it leads to by another.
    listed = [name for name in (file, Path(os.path.realpath(file))) if _is_listed(name)]
    for source in config.sources:
        if isinstance(source, OtlpSource):
            continue
        is_in = isinstance(source, JsonlSource) and any(_same(source.path, name.parent) for name in listed)
        if is_in or _same(source.path, file):
            return source.path
    return None


def _is_listed(file: Path) -> bool:
    """Whether a directory of lines would be read with this file in it."""
    return file.suffix == ".jsonl" and not file.name.startswith(".")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        # What does not exist yet is known by its name alone.
        return os.path.realpath(one) == os.path.realpath(other)


def default_state_dir() -> Path:
    """`$FLYWHEEL_HOME`, else `flywheel` under the XDG state directory. Raises ConfigError."""
    if home := os.environ.get("FLYWHEEL_HOME"):
        return _of_environment(home, "FLYWHEEL_HOME")
    xdg = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return _of_environment(xdg, "XDG_STATE_HOME") / "flywheel"


def _of_environment(text: str, name: str) -> Path:
    try:
        return expanded(Path(text))
    except ValueError as error:
        raise ConfigError(f"find the state directory {text}", str(error), f"Set state.dir, or ${name}.") from None


def defaults() -> Config:
    """What holds without a configuration file. Raises ConfigError."""
    attempted = "use the default settings"
    try:
        config = Config()
    except ValidationError as error:
        raise ConfigError(attempted, explain(error, Config), "Name a configuration with -c.") from None
    _refuse_a_task_file_that_is_read(config, attempted)
    return config


def load(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError."""
    raw = read_yaml(path, f"read configuration {path}", "Run `flywheel init` to make one.", keys_once=True).value
    return parse({} if raw is None else raw, str(path), path.parent, file=path.absolute())


def parse(raw: Any, name: str, folder: Path, *, file: Path | None = None) -> Config:
    """Check a parsed configuration; its relative paths are relative to `folder`. Raises ConfigError."""
    attempted = f"use configuration {name}"
    if not isinstance(raw, dict):
        raise ConfigError(attempted, f"its root is a {type(raw).__name__}, not a mapping", "Start with `sources:`.")
    own = translated(raw, Config.model_fields.keys(), name, file)
    try:
        config = Config.model_validate(own)
    except ValidationError as error:
        # What was translated stands elsewhere in the file, under other names.
        document = YamlDocument(file.read_text(encoding="utf-8")) if file is not None and own is raw else None
        why = explain(error, Config, document)
        raise ConfigError(attempted, why, "Correct the file; see `flywheel docs configuration`.") from None
    config = _anchored(config, folder.absolute())
    _refuse_a_task_file_that_is_read(config, attempted)
    return config


def _refuse_a_task_file_that_is_read(config: Config, attempted: str) -> None:
    try:
        task_file = config.task_file.absolute()
    except (ConfigError, OSError):
        # The state directory cannot be found: what needs it says so, and not everything does.
        return
    if (source := source_at(config, task_file)) is not None:
        raise ConfigError(
            attempted,
            f"the task file {task_file} is read by the source {source}",
            "Name another with `ingest.output`: Flywheel does not write to what it reads.",
        )


def _anchored(config: Config, folder: Path) -> Config:
    def anchor(path: Path) -> Path:
        return tidied(folder / path)

    base = config.model.base
    if base.startswith(("./", "../")):
        # As it is written: adapters are held against the name of the model that they were trained on.
        base = str(folder / base)
    chain, output, state = config.filter.chain, config.ingest.output, config.state.dir
    return config.model_copy(
        update={
            "sources": [
                source if isinstance(source, OtlpSource) else source.model_copy(update={"path": anchor(source.path)})
                for source in config.sources
            ],
            "filter": config.filter.model_copy(
                update={"rubric": anchor(config.filter.rubric), "chain": chain and anchor(chain)}
            ),
            "ingest": config.ingest.model_copy(update={"output": output and anchor(output)}),
            "state": config.state.model_copy(update={"dir": state and anchor(state)}),
            "model": config.model.model_copy(update={"base": base}),
        }
    )
