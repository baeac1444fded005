"""The configuration file: read and checked, with absolute paths.

The docstring of each field is its documentation (`scripts/configuration_page.py` makes the page). Unknown keys are
errors. Secrets are never in the file: it names environment variables.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from flywheel.config import agentjet
from flywheel.config.agentjet import AGENTJET, MARKERS, SECTION, ProjectRoot
from flywheel.config.deploy import DeploySettings
from flywheel.config.export import ExportSettings
from flywheel.config.foreign import Row, with_names
from flywheel.config.ingest import (
    CallsSource,
    IngestSettings,
    JsonlSource,
    ModelFilter,
    SourceSettings,
    StudioSource,
)
from flywheel.config.interpolation import values_of
from flywheel.config.judge import FilterSettings, JudgeSettings
from flywheel.config.notices import NotifyList
from flywheel.config.privacy import PrivacySettings
from flywheel.config.sage import ROOTS, SAGE
from flywheel.config.section import GivenSetting, Section, UserPath, has, leaves
from flywheel.config.serving import DaemonSettings, ServingSettings
from flywheel.config.training import (
    AgentProgramSettings,
    GateSettings,
    ModelSettings,
    RaySettings,
    RetentionSettings,
    RolloutSettings,
    TargetSettings,
    TrackingSettings,
    TrainingSettings,
    TriggerSettings,
)
from flywheel.config.translation import TUNER, Translation, translate
from flywheel.config.trinity import TRINITY, is_trinitys
from flywheel.errors import ConfigError
from flywheel.records.exclusion import Exclusion, Scope, TargetNames, TaskScopes, TrainedModels
from flywheel.system.files import expanded, holds_lines
from flywheel.system.yaml_file import YamlDocument, explain, is_among, read_yaml

TRAINING_SECTIONS: Final = frozenset({"model", "targets", "trigger", "training", "rollout", "gate"})
"""A configuration that has none of them only judges."""
MAX_SOURCES: Final = 256
MAX_TARGETS: Final = 64
DATA_SETS: Final = "datasets"
"""The folder of the copies of data sets, in the directory of the state."""


class StateSettings(Section):
    dir: UserPath | None = None
    """Directory of `state.db`, `tasks.jsonl`, rounds and adapters. Default: `$FLYWHEEL_HOME`, else `flywheel` in the
    XDG state directory."""


class Config(Section):
    state: StateSettings = StateSettings()
    sources: list[SourceSettings] = Field(
        default_factory=lambda: list[SourceSettings]([StudioSource()]), max_length=MAX_SOURCES
    )
    """Where replies are read. Default: Studio's database at its default path."""
    ingest: IngestSettings = IngestSettings()
    privacy: PrivacySettings = PrivacySettings()
    judge: JudgeSettings = JudgeSettings()
    filter: FilterSettings = FilterSettings()
    trigger: TriggerSettings = TriggerSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    rollout: RolloutSettings = RolloutSettings()
    tracking: TrackingSettings = TrackingSettings()
    gate: GateSettings = GateSettings()
    targets: dict[str, TargetSettings] = Field(default={}, max_length=MAX_TARGETS)
    """Agents that are trained separately, by name, each with an alias, rounds and a gate. Default: one target,
    `model.alias`, for all replies."""
    serving: ServingSettings = ServingSettings()
    deploy: DeploySettings = DeploySettings()
    ray: RaySettings = RaySettings()
    retention: RetentionSettings = RetentionSettings()
    daemon: DaemonSettings = DaemonSettings()
    notify: NotifyList = []
    """Webhooks and commands that the daemon tells of events."""
    export: ExportSettings = ExportSettings()
    """Other programs that the daemon sends scores of replies to."""
    _target: str = PrivateAttr(default="")
    _whole: Config | None = PrivateAttr(default=None)
    _file: Path | None = PrivateAttr(default=None)
    _project: ProjectRoot | None = PrivateAttr(default=None)
    _read_from: tuple[str, YamlDocument] | None = PrivateAttr(default=None)
    _given: frozenset[str] = PrivateAttr(default=frozenset())
    _origins: Mapping[str, Row] = PrivateAttr(default={})

    @model_validator(mode="after")
    def _check(self) -> Self:
        training, rollout, gate, rank = self.training, self.rollout, self.gate, self.serving.max_lora_rank
        longest = rollout.max_completion_tokens
        waited_for = gate.min_tasks if self.trigger.min_held_out is None else self.trigger.min_held_out
        finds_calls = any(isinstance(source, CallsSource) for source in self.sources)
        for is_wrong, why in (
            (
                finds_calls and self.serving.call_log is None,
                "`sources`: type calls needs the calls that `flywheel serve` records, and serving.call_log is false",
            ),
            (
                longest is not None and longest >= rollout.max_model_len,
                f"`rollout`: max_completion_tokens {longest} leaves no room for a prompt in max_model_len"
                f" {rollout.max_model_len}",
            ),
            (
                bool(gate.non_inferiority_margins) and not rollout.weights.rubric,
                "`gate`: non_inferiority_margins are about criteria of the rubric, and with rollout.reward.rubric 0"
                " it is not asked: nothing could ever be promoted",
            ),
            (
                any(suite.rubric for suite in gate.suites.values()) and not rollout.weights.rubric,
                "`gate.suites`: a suite has a rubric, and with rollout.reward.rubric 0 no rubric is asked",
            ),
            (
                gate.max_tasks < gate.min_tasks,
                f"`gate`: max_tasks {gate.max_tasks} is below min_tasks {gate.min_tasks}: nothing could ever be"
                " promoted",
            ),
            (
                training.lora.r > rank,
                f"training.lora.r {training.lora.r} is above serving.max_lora_rank {rank}: the server would not take"
                " what a round trains",
            ),
            (
                waited_for < gate.min_tasks,
                f"trigger.min_held_out {waited_for} is below gate.min_tasks {gate.min_tasks}: a round could start"
                " that can only be rejected",
            ),
            (
                gate.min_gain >= 1 and not rollout.weights.workflow,
                f"`gate.min_gain`: scores of a rubric lie between 0 and 1, and no gain is above {gate.min_gain:g}",
            ),
            *self._wrong_targets(),
            *self._wrong_teachers(),
        ):
            if is_wrong:
                raise ValueError(why)
        with contextlib.suppress(ConfigError, OSError):  # commands that need the state directory report that
            task_file = self.task_file.absolute()
            if (source := source_at(self, task_file)) is not None:
                raise ValueError(
                    f"the task file {task_file} is read by the source {source}. Name another with `ingest.output`:"
                    " Flywheel never writes to a source"
                )
        return self

    def _wrong_targets(self) -> Iterator[tuple[bool, str]]:
        """What may be wrong about `targets`: whether it is, and a message."""
        names = self._target_names()
        for one, other in itertools.combinations(names, 2):
            both = set(one.agents) & set(other.agents)
            pair = f"`targets`: {one.target} and {other.target}"
            yield one.alias == other.alias, f"{pair} have the same alias, {one.alias}"
            yield bool(both), f"{pair} both have the agent {', '.join(sorted(both))}; a reply is a task of one target"
        base = Path(self.model.base)
        for alias in self.aliases:
            is_base = alias == (base.name if base.is_absolute() else self.model.base)
            yield is_base, f"the alias {alias} is the name of the base model, `model.base`: name it otherwise"
            is_other = self.rollout.models.get(alias, "policy") != "policy"
            yield is_other, f"`rollout.models`: {alias} is an alias, which its own model answers: remove it there"
        for each in names:
            where = f"targets.{each.target}"
            is_name = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", each.target) is not None
            yield not is_name, f"`{where}`: a target's name has only letters, digits and `_.-`"
            is_taken = each.target in self.rollout.auxiliary_models
            yield is_taken, f"`{where}`: rollout.auxiliary_models has a model of that name as well"

    def _wrong_teachers(self) -> Iterator[tuple[bool, str]]:
        """The same of `sources[].models.teachers`."""
        has_teachers = any(source.models.teachers for source in self.sources)
        yield (
            has_teachers and "sft" not in self.training.kinds,
            "`sources[].models.teachers`: only SFT imitates replies, and training.stages has no sft."
            " `sources[].models.include` trains on the prompts of other models",
        )
        yield (
            has_teachers and bool(self.targets) and not any(each.agents for each in self.targets.values()),
            "`sources[].models.teachers`: a teacher's reply is a task of a target by its agent's name; set"
            " `targets.NAME.agents`",
        )

    def _target_names(self) -> tuple[TargetNames, ...]:
        return tuple(
            TargetNames(name, each.alias or name, tuple([name] if each.agents is None else each.agents))
            for name, each in self.targets.items()
        )

    def correction(self, *path: str) -> str:
        """What to do about a value that cannot be used: its key, and where the file has it."""
        key = f"Correct {'.'.join(path)}"
        if self.is_given(".".join(path)):
            return f"Correct --set {'.'.join(path)}."
        if self._read_from is None:
            return f"{key}."
        name, document = self._read_from
        return f"{key} on line {document.position(path).line} of {name}."

    def is_given(self, key: str) -> bool:
        """Whether a setting, or a part of it, is from the command line (`--set`)."""
        # A key of another program's file names no source by its number.
        return is_among(key, self._given) or is_among(re.sub(r"\.\d+", "", key), self._given)

    @property
    def warnings(self) -> list[str]:
        """What is probably not meant as it is written, for people."""
        only = [each for each in self.ingest.agents.exclude if each not in self.privacy.exclude.agents]
        return [
            f"ingest.agents.exclude names {each}, and privacy.exclude.agents does not: its replies become no tasks, "
            "but their traces and recorded calls are stored. Name it there too, and there will only be a count."
            for each in only
        ]

    @property
    def origins(self) -> Mapping[str, Row]:
        """What other programs' keys set, by Flywheel's keys, and what AgentJet assumes."""
        return self._origins

    @property
    def assumed(self) -> str:
        """What AgentJet's or ASTuner's file stands for where it sets nothing; empty for Flywheel's own."""
        said = agentjet.assumptions(self._origins.values())
        if (judge := self._origins.get("judge.base_url")) is not None and not judge.place:
            said.append(f"replies are sent to the judge {self.judge.model} at {self.judge.base_url} (judge.base_url)")
        return f"as in AgentJet, where the file sets nothing: {'; '.join(said)}" if said else ""

    @property
    def has_trainer(self) -> bool:
        """Whether there is any setting of what is trained, or how. A configuration without one only judges."""
        return not TRAINING_SECTIONS.isdisjoint(self.model_fields_set)

    @property
    def target(self) -> str:
        """The target whose settings these are; empty for those of the file, see `by_target`."""
        return self._target

    @property
    def aliases(self) -> tuple[str, ...]:
        """The stable model names that agents call: one, or that of each target."""
        return tuple(each.alias for each in self._target_names()) or (self.model.alias,)

    def by_target(self) -> dict[str, Config]:
        """The settings of each target by its name: alias, rubric and samples of a round are its own. Without
        `targets`, these settings under an empty name."""
        whole = self._whole or self
        return {each.target: whole._of(each) for each in self._target_names()} or {"": whole}

    def _of(self, names: TargetNames) -> Config:
        given = self.targets[names.target]
        rubric = {"rubric": given.rubric} if given.rubric is not None else {}
        least = {"min_samples": given.min_samples} if given.min_samples is not None else {}
        own = self.model_copy(
            update={
                "model": self.model.model_copy(update={"alias": names.alias}),
                "filter": self.filter.model_copy(update=rubric),
                "trigger": self.trigger.model_copy(update=least),
            }
        )
        own._target, own._whole = names.target, self
        return own

    def models_of(self, source: SourceSettings | None) -> TrainedModels:
        """The models whose replies from a source are trained on. None for a source that is no longer configured."""
        chosen = source.models if source is not None else ModelFilter()
        patterns = tuple(chosen.include), tuple(chosen.exclude)
        names = self._target_names()
        return TrainedModels(self.model.alias, self.model.base, *patterns, names, tuple(chosen.teachers))

    def is_teacher(self, model: str, adapter: str) -> bool:
        """Whether such a reply is one of a source's teachers."""
        return any(self.models_of(source).is_teacher(model, adapter) for source in self.sources)

    @property
    def takes(self) -> TaskScopes:
        """The exclusions that these settings permit, of tasks of their target."""
        both = {Exclusion.IMAGE} if self.training.images == "text-only" else set()
        if self.training.inexact_prompts == "use":
            both |= {Exclusion.HIDDEN, Exclusion.INEXACT}
        if self.rollout.agent == "reply":
            return self._selected(both, both)
        both |= {Exclusion.TOOLS}
        uncalled = {Exclusion.UNCALLED}
        if isinstance(self.rollout.agent, AgentProgramSettings):
            # It makes its own prompts and runs its own tools: it needs no recordings.
            both |= {Exclusion.HIDDEN, Exclusion.INEXACT, Exclusion.UNRECORDED, Exclusion.UNDEFINED, *uncalled}
            return self._selected(both, both)
        train = both | uncalled if self.rollout.tools.uncalled == "use" else both
        # After a wrong answer without a call, no recording could show whether a call would have been better.
        return self._selected(train, both | uncalled, if_accepted=uncalled)

    def _selected(
        self, train: Set[Exclusion], gate: Set[Exclusion], if_accepted: Set[Exclusion] = frozenset()
    ) -> TaskScopes:
        target, training = self._target or None, self.training
        uses = training.max_uses if training.prompts == "decided" else 0
        return TaskScopes(
            Scope(frozenset(train), target, rejected_uses=uses),
            Scope(frozenset(gate), target, frozenset(if_accepted)),
        )

    @property
    def max_adapters(self) -> int:
        """Number of adapters in one batch of a server: `serving.max_loras` of each target."""
        return self.serving.max_loras * len(self.aliases)

    @property
    def file(self) -> Path | None:
        """The file that the settings were read from; None without one."""
        return self._file

    @property
    def project(self) -> ProjectRoot | None:
        """Where relative paths of AgentJet's or ASTuner's file start; None for Flywheel's own, see `file`."""
        return self._project

    @property
    def state_dir(self) -> Path:
        return self.state.dir or default_state_dir()

    @property
    def task_file(self) -> Path:
        return self.ingest.output or self.state_dir / "tasks.jsonl"


def source_at(config: Config, file: Path) -> Path | None:
    """The source that reads this file, if any; the task file must not be one."""
    target = Path(os.path.realpath(file))
    # A JSONL source reads a symbolic link under its own name, and its target under another.
    listed = [name for name in (file, target) if holds_lines(name)]
    folders = {os.path.realpath(name.parent) for name in listed}
    for source in config.sources:
        if isinstance(source, StudioSource | JsonlSource):
            path = os.path.realpath(source.path)
            if path == str(target) or (isinstance(source, JsonlSource) and path in folders):
                return source.path
    return None


def default_state_dir() -> Path:
    """`$FLYWHEEL_HOME`, else `flywheel` under the XDG state directory. Raises ConfigError."""
    home = os.environ.get("FLYWHEEL_HOME")
    name = "FLYWHEEL_HOME" if home else "XDG_STATE_HOME"
    text = home or os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        path = expanded(Path(text))
    except ValueError as error:
        raise ConfigError(f"find the state directory {text}", str(error), f"Set state.dir, or ${name}.") from None
    return path if home else path / "flywheel"


def defaults(given: Sequence[str] = ()) -> Config:
    """The configuration without a file, with settings that are `given` as KEY=VALUE. Raises ConfigError."""
    if given:
        return parse({}, "without a file", Path.cwd(), given=given)
    try:
        return Config()
    except ValidationError as error:
        why = explain(error, Config)
        raise ConfigError("use the default settings", why, "Name a configuration with -c.") from None


def load(path: Path, given: Sequence[str] = ()) -> Config:
    """Read and check a configuration file, with settings that are `given` as KEY=VALUE. Raises ConfigError."""
    attempted = f"read configuration {path}"
    document = read_yaml(path, attempted, "Run `flywheel init` to make one.", keys_once=True)
    raw = {} if document.value is None else values_of(document, attempted)
    return parse(raw, str(path), path.parent, file=path.absolute(), document=document, given=given)


def parse(
    raw: Any,
    name: str,
    folder: Path,
    *,
    file: Path | None = None,
    document: YamlDocument | None = None,
    given: Sequence[str] = (),
    found: Translation | None = None,
    names: Mapping[str, str] | None = None,
) -> Config:
    """Check a parsed configuration. Relative paths are relative to `folder`, or to the project root of a file of
    AgentJet's. Raises ConfigError.

    With the `document` that `raw` is from, what is wrong is named with its line. Settings that are `given` as
    KEY=VALUE take the place of those in `raw`. What becomes of `raw` is `found`, if it is known and said already. In
    errors, settings have the caller's `names`, by Flywheel's keys.
    """
    attempted, settings = f"use configuration {name}", [GivenSetting.of(text) for text in given]
    if not isinstance(raw, dict):
        raise ConfigError(attempted, f"its root is a {type(raw).__name__}, not a mapping", "Start with `sources:`.")
    if is_trinitys(raw):
        raise ConfigError(
            attempted,
            "it is a configuration of Trinity-RFT, for AgentScope's tuner",
            f"`flywheel migrate {name} --output DIR` writes a script that trains with it by `flywheel.tuner.tune`.",
        )
    whole, of_file, what = raw, name, "the file"
    for setting in settings:
        whole, what = setting.put_into(whole), "the file or --set"
    if settings:
        name += f" with --set {', '.join(setting.key for setting in settings)}"

    attempted, is_said = f"use configuration {name}", found is not None
    found = found or translate(whole, file)
    # A setting of Trinity-RFT's makes no file of its own.
    rows = found.rows if found.program != TUNER else ()
    keys = {key for setting in settings for key in _own_keys(setting, whole, raw, rows)}
    if not is_said:
        found.check(attempted, str(file or name))
    # Translated keys have other names and positions in the file.
    document = None if found.rows else document
    try:
        start = found.project.folder if found.project is not None else folder.absolute()
        config = Config.model_validate(_with_dataset_paths(found.settings_in(file)), context=start)
    except ValidationError as error:
        places = {numbered(use): row.place for use, row in _origins(found.rows, whole).items() if row.place}
        why = with_names(explain(error, Config, document, elsewhere=keys), {**places, **(names or {})})
        hint = f"Correct {what}; see `flywheel docs configuration`."
        raise ConfigError(attempted, why, hint) from None
    config._file, config._project, config._given = file, found.project, frozenset(keys)
    config._origins = _origins(found.rows, whole)
    config._read_from = (of_file, document) if document is not None else None
    return config


def _with_dataset_paths(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings in which each source with a data set has a path. Raises ConfigError."""
    sources, state = raw.get("sources"), raw.get("state")
    if not isinstance(sources, list):
        return raw

    def placed(source: Any) -> Any:
        of = source.get("dataset") if isinstance(source, dict) and not source.get("path") else None
        if not isinstance(of, dict):
            return source
        parts = [str(of[key]) for key in ("path", "name", "split") if of.get(key)]
        file = re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.")
        folder = (state.get("dir") if isinstance(state, dict) else None) or default_state_dir()
        return {**source, "path": f"{folder}/{DATA_SETS}/{file}.jsonl"}

    made = [placed(source) for source in sources]
    return {**raw, "sources": made} if made != sources else raw


def _origins(rows: Sequence[Row], whole: Mapping[str, Any]) -> dict[str, Row]:
    """The rows that set each of Flywheel's keys; its own, and its own list of sources, take precedence."""
    return {
        row.use: row
        for row in rows
        if row.sets
        and not has(whole, row.use)
        and not (row.place and row.use.startswith("sources.") and "sources" in whole)
    }


def numbered(key: str) -> str:
    """Flywheel's key of a row, with the number that the only source of another program's file has."""
    return re.sub(r"^sources\.(?!\d)", "sources.0.", key)


def _own_keys(
    setting: GivenSetting, whole: Mapping[str, Any], raw: Mapping[str, Any], rows: Sequence[Row]
) -> set[str]:
    """Our keys that follow from a given setting of `whole`, which is `raw` with it. Raises ConfigError for another
    program's key that has no effect, and names ours."""
    key, attempted = setting.key, f"use --set {setting.key}"
    section, _, below = key.partition(".")
    name = below if section in ROOTS else f"task_reader.{key}" if section == SECTION else key
    outcomes = [row.outcome for row in rows if row.place == key]
    # What is refused has its own reason.
    is_theirs = (name in _FOREIGN or bool(outcomes)) and "refused" not in outcomes
    if section in Config.model_fields or (section not in MARKERS and not is_theirs):
        return {key}
    if f"{SECTION}.filters" in key:
        raise ConfigError(attempted, "filters are read from the file itself", "Use --set filter.chain=FILE.")
    is_possible = (section not in MARKERS or section in raw) and all(row.use for row in rows if row.place == key)
    places = {use: row.place for use, row in _origins(rows, whole).items() if is_possible and row.place}
    found = {use for use, place in places.items() if is_among(key, {place})}
    # One that the file has may be for the user's workflow.
    if not found and not any(is_among(each, {key}) for each, _ in leaves(raw)):
        close = [name] if name in _FOREIGN else difflib.get_close_matches(name, _FOREIGN, n=1, cutoff=0.8)
        hint = f"Flywheel's own key for `{close[0]}` is {_FOREIGN[close[0]]}." if close else "Correct it."
        why = "Flywheel does not use this key, and the file does not have it"
        raise ConfigError(attempted, why, f"{hint} See `flywheel docs configuration`.")
    return found


_FOREIGN: Final = {
    name: use.replace("sources.", "sources[].")
    for table in (TRINITY, AGENTJET, SAGE)
    for whole, use in table.uses.items()
    for name in (whole, whole.removeprefix("rl_config."))
    if use.partition(".")[0] in Config.model_fields
}
"""Flywheel's keys, by those of other programs, without their root."""
