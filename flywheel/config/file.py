"""The configuration file: read, check, and make paths absolute.

The docstring of each field is its documentation (`scripts/configuration_page.py` makes the page). Unknown keys are
errors. Secrets are never in the file: it names environment variables.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from flywheel.config.agentjet import MARKERS, translated
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
    """The state directory: `state.db`, `tasks.jsonl`, rounds and adapters. Default: `$FLYWHEEL_HOME`, else `flywheel`
    under the XDG state directory."""


class Config(Section):
    state: StateSettings = StateSettings()
    sources: list[SourceSettings] = Field(default_factory=lambda: list[SourceSettings]([StudioSource()]))
    """The sources to watch. Default: the default path of Studio's database."""
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
        """The models whose replies from a source are trained on. None for a source that is no longer configured."""
        chosen = source.models if source is not None else ModelFilter()
        return TrainedModels(self.model.alias, self.model.base, tuple(chosen.include), tuple(chosen.exclude))

    @property
    def state_dir(self) -> Path:
        return self.state.dir or default_state_dir()

    @property
    def task_file(self) -> Path:
        return self.ingest.output or self.state_dir / "tasks.jsonl"


def source_at(config: Config, file: Path) -> Path | None:
    """The source that reads this file, if any; the task file must not be one."""
    # A JSONL source reads a symbolic link under its own name, and its target under another.
    names = (file, Path(os.path.realpath(file)))
    listed = [name for name in names if name.suffix == ".jsonl" and not name.name.startswith(".")]
    for source in config.sources:
        if isinstance(source, OtlpSource):
            continue
        is_in = isinstance(source, JsonlSource) and any(_same(source.path, name.parent) for name in listed)
        if is_in or _same(source.path, file):
            return source.path
    return None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        # Files that do not exist yet are compared by name.
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
    """The configuration without a file. Raises ConfigError."""
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
    """Check a parsed configuration. Relative paths are relative to `folder`. Raises ConfigError."""
    attempted = f"use configuration {name}"
    if not isinstance(raw, dict):
        raise ConfigError(attempted, f"its root is a {type(raw).__name__}, not a mapping", "Start with `sources:`.")
    is_agentjets = not MARKERS.isdisjoint(map(str, raw))
    own = translated(raw, Config.model_fields.keys(), name, file) if is_agentjets else raw
    try:
        config = Config.model_validate(own)
    except ValidationError as error:
        # Translated keys have other names and positions in the file.
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
        # The state directory cannot be found; commands that need it report that.
        return
    if (source := source_at(config, task_file)) is not None:
        raise ConfigError(
            attempted,
            f"the task file {task_file} is read by the source {source}",
            "Name another with `ingest.output`: Flywheel never writes to a source.",
        )


def _anchored(config: Config, folder: Path) -> Config:
    """The configuration with absolute paths: relative ones are relative to `folder`."""
    base = config.model.base
    if base.startswith(("./", "../")):
        # Not tidied: adapters record the name of the base model as it was written.
        base = str(folder / base)
    chain, output, state = config.filter.chain, config.ingest.output, config.state.dir
    return config.model_copy(
        update={
            "sources": [
                source
                if isinstance(source, OtlpSource)
                else source.model_copy(update={"path": tidied(folder / source.path)})
                for source in config.sources
            ],
            "filter": config.filter.model_copy(
                update={"rubric": tidied(folder / config.filter.rubric), "chain": chain and tidied(folder / chain)}
            ),
            "ingest": config.ingest.model_copy(update={"output": output and tidied(folder / output)}),
            "state": config.state.model_copy(update={"dir": state and tidied(folder / state)}),
            "model": config.model.model_copy(update={"base": base}),
        }
    )
