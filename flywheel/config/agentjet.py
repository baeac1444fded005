"""Configurations of AgentJet or ASTuner, translated to Flywheel's keys.

The section `feedback_tracing` (at the root, or in `task_reader` below `ajet` or `astuner`) has Studio's database, the
task file, the judge's model and its parameters. Below the root are the trained model, rollouts with the workflow that
runs in them, and the class that rewards it. `flywheel.config.agentjet_keys` lists what becomes of each key. Relative
paths start at one folder, as in AgentJet, which runs in the folder that has the workflow's package.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flywheel.config.agentjet_keys import COPIED, MADE, MODEL, OUTSIDE, REFUSED, UNUSED
from flywheel.config.sage import READ, ROOTS, by_name, names_in
from flywheel.config.section import GivenSetting, has, leaves, merged, put
from flywheel.config.training import TRACKER_PACKAGES
from flywheel.errors import ConfigError
from flywheel.system.files import tidied
from flywheel.system.process import gpus_of_machine
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

SECTION: Final = "feedback_tracing"
MARKERS: Final = frozenset((*ROOTS, SECTION))
"""Root keys that identify such a configuration."""
TRACING: Final = "tracing"
HUB: Final = "huggingface_dat_repo"
"""The type of `task_reader` that reads a data set of the Hub, or a folder."""
LINES: Final = ("jsonl", "jsonl_dataset_file", "dataset_file")
"""The types of `task_reader` that read files of tasks; below a key of that name, `training.file_path` is the file."""
LOOPS: Final = "nonsense"
"""The check in `compute_madness_checklist` that finds loops."""
WORKFLOW_KEYS: Final = ("user_workflow", "agentscope_workflow", "agentscope_learn_protocol")
"""The names that the workflow's key has had, the present one first."""
DASHSCOPE: Final = "https://dashscope.aliyuncs.com/compatible-mode/v1"
DASHSCOPE_KEYS: Final = ("DASHSCOPE_API_KEY", "DASHSCOPE_API_KEY_BACKUP")
DASHSCOPE_JUDGE: Final = {
    "model": MODEL,
    "base_url": DASHSCOPE,
    "api_key_env": DASHSCOPE_KEYS[0],
    "backup": {"api_key_env": DASHSCOPE_KEYS[1]},
}
"""AgentJet's judge, for a file without the address of another."""
ASSUMED: Final[dict[str, tuple[Any, str]]] = {
    "sources.models.include": (["*"], "replies of every model count"),
    "training.inexact_prompts": ("use", "tasks without an exact prompt are used"),
    "rollout.tools.uncalled": ("use", "tasks whose tools were not called are used"),
}
"""Keys whose default of Flywheel's would leave out tasks that AgentJet uses: the value of a file that sets none, and
what it means."""
PATHS: Final = frozenset({"sources.path", "ingest.output", "rollout.agent.workflow", "rollout.reward_function"})
"""Flywheel's keys that such a file sets to paths."""
HUB_NAMES: Final = ("model.base", "sources.dataset.path")
"""Keys that it sets to paths or names of the Hub."""
USED: Final = by_name({**COPIED, **MADE, **READ})
_REFUSED: Final = by_name(REFUSED)
_BELOW: Final = by_name(COPIED | MADE | UNUSED)
_ROWS: Final = by_name(OUTSIDE) | _BELOW
_SECTION_KEYS: Final = [name.rpartition(".")[2] for name in USED if name.startswith(f"task_reader.{SECTION}.")]


@dataclass(frozen=True, slots=True)
class ProjectRoot:
    """The folder at which relative paths of such a file start, and how it was found."""

    folder: Path
    why: str

    def __str__(self) -> str:
        return f"the project root {self.folder}, {self.why}"


def project_root(raw: Mapping[str, Any], file: Path) -> ProjectRoot:
    """The nearest folder at or above `file` with the package or file of the workflow or the judge; without one, the
    working directory if the file is below it, else the file's folder."""
    modules = [*_modules(raw)]
    tops = [Path(module.parts[0]) for module in modules]
    folders = tidied(file).parents
    # An output of an earlier run may have the name of the package: a folder with the modules themselves is preferred.
    for enough, wanted in ((all, modules), (any, modules), (any, tops)):
        for folder in folders if wanted else ():
            if enough(_has(folder, module) for module in wanted):
                top = next(top for top in tops if _has(folder, top))
                return ProjectRoot(folder, f"where {top}{'/' if (folder / top).is_dir() else '.py'} is")
    with contextlib.suppress(OSError):
        here = Path.cwd()
        # A service without a working directory starts in /, which is no project.
        if here != Path("/") and Path(os.path.realpath(folders[0])).is_relative_to(here):
            return ProjectRoot(here, "the working directory")
    return ProjectRoot(folders[0], "the folder of the configuration")


def _modules(raw: Mapping[str, Any]) -> Iterator[Path]:
    """The relative paths of the modules of workflow and judge, without `.py`."""
    settings, own = _settings(raw), _mapping(raw.get("rollout"))
    judge = _mapping(settings.get("task_judge")).get("judge_protocol")
    workflow = _mapping(own.get("agent")).get("workflow")
    for name in (_workflow(settings), workflow, judge, own.get("reward_function")):
        where = re.split("->|:", name)[0].strip() if isinstance(name, str) else ""
        path = Path(where) if where.endswith(".py") else Path(*where.split("."))
        if path.parts and not path.is_absolute() and path.parts[0][0] not in "~.":
            yield path.with_suffix("")


def _has(folder: Path, module: Path) -> bool:
    return any(os.path.exists(folder / name) for name in (module, f"{module}.py"))  # noqa: PTH110 - False if denied


def filters_in(raw: Any) -> Any:
    """The filters of such a configuration as a chain, in their order and with AgentJet's embeddings; other values of
    `raw` unchanged."""
    located = section_in(raw)
    if located is None or not isinstance(located[1], Mapping):
        return raw
    filters = located[1].get("filters") or []
    made = [_with_embeddings(each) for each in filters] if isinstance(filters, list) else filters
    return {"version": 1, "id": "agentjet", "keep_order": True, "filters": made}


def _with_embeddings(entry: Any) -> Any:
    params = _mapping(_mapping(entry).get("params"))
    url = params.get("base_url") or DASHSCOPE
    if not params.get("model") or "dashscope" not in str(url) or entry.get("type") != "deduplication":
        return entry
    key, backup = DASHSCOPE_KEYS
    return entry | {"params": {"api_key_env": key, "backup_api_key_env": backup, **params, "base_url": url}}


def from_agentjet(
    raw: Mapping[str, Any], sections: Collection[str], name: str, file: Path | None
) -> Mapping[str, Any]:
    """Such a configuration in Flywheel's keys; other configurations unchanged. Raises ConfigError.

    `sections` are Flywheel's own sections, which may also be present and take precedence. Relative paths stay
    relative; see `project_root`.
    """
    if (located := section_in(raw)) is None:
        return raw
    attempted, root = f"use configuration {name}", _root(raw)
    # A line of the log for each key: the file is enough.
    shown = str(file or name)
    settings = _settings(raw)
    reader = _mapping(settings.get("task_reader"))
    kind = reader.get("type", TRACING)
    section = _checked_section(*located, kind, attempted)
    given = [each for each in keys_in(raw, sections) if each[2] is not None]
    for place, key, value in given:
        if (refused := _REFUSED.get(f"{key}: {value}")) is not None:
            why = f"`{place}` is {value}, which Flywheel does not take: {refused.why}"
            raise ConfigError(attempted, why, f"Use {refused.use}.")
    made: dict[str, Any] = {}
    for place, key, value in given:
        if _is_of_other_reader(key, kind):
            log.warning("%s: without effect: %s: `task_reader.type` is %s", shown, place, kind)
        elif key in COPIED:
            put(made, COPIED[key].use, value)
        elif key not in USED:
            log.warning("%s: without effect: %s: %s", shown, place, _why_unused(key))
    path = made.pop("sources", {}).get("path")
    made["sources"] = _sources_of(reader, kind, path, root, attempted)
    own = {key: value for key, value in raw.items() if key in sections and value is not None}
    # The root may have its earlier name. What else stands in the file, workflows read, too.
    readable = {ROOTS[0] if key == root else key: value for key, value in raw.items() if key not in sections}
    if program := _program(settings, readable, _mapping(own.get("rollout")).get("agent"), root, attempted):
        made = merged(made, {"rollout": program})
    _loops(_mapping(settings.get("rollout")), made, f"{root}.rollout", shown)
    _trainer_common(_mapping(settings.get("trainer_common")), made, f"{root}.trainer_common", shown)
    if file is not None and section.get("filters"):
        put(made, "filter.chain", str(file))
    if not _mapping(own.get("judge")).get("base_url"):
        made["judge"] = DASHSCOPE_JUDGE | made.get("judge", {})
    if "model" in made:
        put(made, "model.base", _placed(made["model"]["base"]))
    is_cluster = _mapping(own.get("ray")).get("address")
    names = f"{root}.rollout.n_vllm_engine", f"{root}.rollout.tensor_model_parallel_size"
    fit_engines({} if is_cluster else made.setdefault("rollout", {}), names, shown)
    result = _with_assumptions(merged(made, own))
    if isinstance(model := result.get("model", {}), Mapping) and not model.get("base"):
        key = f"{root}.model.path" if root else "model.base"
        raise ConfigError(
            attempted,
            f"`{key}` is missing: nothing says which model is trained",
            "Add it: `model: {base: MODEL}` at the root.",
        )
    return result


def _checked_section(place: str, section: Any, kind: Any, attempted: str) -> Mapping[str, Any]:
    """The content of `feedback_tracing`, which only traces need. Raises ConfigError."""
    if kind in (*LINES, HUB) and section is None:
        return {}
    if not isinstance(section, Mapping) and kind == TRACING:
        raise ConfigError(
            attempted,
            f"`{place}` is missing: nothing says where the traces are",
            f"Add it, with a `base_url`, or a `task_reader.type`: {', '.join((*LINES, HUB))}.",
        )
    given = _mapping(section)
    if unknown := [str(key) for key in given if key not in _SECTION_KEYS]:
        close = difflib.get_close_matches(unknown[0], _SECTION_KEYS, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(_SECTION_KEYS)}"
        raise ConfigError(attempted, f"unknown key `{place}.{unknown[0]}` ({meant})", "Correct the file.")
    return given


def _is_of_other_reader(key: str, kind: Any) -> bool:
    """Whether a key says where another type of `task_reader` finds tasks."""
    outer, _, rest = key.partition(".")
    section = rest.partition(".")[0]
    return outer == "task_reader" and (
        section != kind if section in (*LINES, HUB) else kind != TRACING and rest == f"{SECTION}.base_url"
    )


def assumed_in(settings: Mapping[str, Any]) -> list[str]:
    """The keys of `ASSUMED` that settings of Flywheel's lack; with the number of the source if there are sources."""
    first, *others = ASSUMED
    sources = settings.get("sources")
    if isinstance(sources, list):
        _, *path = first.split(".")
        found = [f"sources.{n}.{'.'.join(path)}" for n, source in enumerate(sources) if _lacks(source, path)]
    else:
        found = [first] if sources is None else []
    return found + [key for key in others if _lacks(settings, key.split("."))]


def _with_assumptions(settings: dict[str, Any]) -> dict[str, Any]:
    for key in assumed_in(settings):
        settings = GivenSetting(key, ASSUMED[_without_number(key)][0]).put_into(settings)
    return settings


def assumptions(keys: Iterable[str], judge: str) -> str:
    """What such a file means where it does not set these keys, or the address of the `judge`, which is empty where it
    does; empty for none."""
    said = [
        f"{ASSUMED[key][1]} ({key.replace('sources.', 'sources[].')}: {ASSUMED[key][0]})"
        for key in dict.fromkeys(map(_without_number, keys))
    ]
    if judge:
        said.append(f"replies are sent to the judge {judge} (judge.base_url)")
    return f"as in AgentJet, where the file sets nothing: {'; '.join(said)}" if said else ""


def _without_number(key: str) -> str:
    return re.sub(r"\.\d+", "", key)


def _lacks(settings: Any, path: Iterable[str]) -> bool:
    """Whether nested mappings have no value at a path, and could have one."""
    for part in path:
        if not isinstance(settings, Mapping):
            return False
        if part not in settings:
            return True
        settings = settings[part]
    return False


def origins_in(raw: Mapping[str, Any], sections: Collection[str]) -> Iterator[tuple[str, str, bool]]:
    """The keys of Flywheel that such a file sets by other names alone: each with its place in the file (empty: it is
    AgentJet's default), and whether it is a relative path."""
    for use, place, is_path in _origins_in(raw, sections):
        if not has(raw, use.split(".")) and (use != "sources.path" or "sources" not in raw):
            yield use, place, is_path


def _origins_in(raw: Mapping[str, Any], sections: Collection[str]) -> Iterator[tuple[str, str, bool]]:
    for key in assumed_in(raw):
        yield key, "", False
    for key, _ in leaves(DASHSCOPE_JUDGE, "judge"):
        yield key, "", False
    kind = _mapping(_settings(raw).get("task_reader")).get("type", TRACING)
    for place, key, value in keys_in(raw, sections):
        option = USED.get(key.removeprefix("rl_config."))
        if option is not None and option.use and value is not None and not _is_of_other_reader(key, kind):
            for use in option.use.split(", "):
                is_path = use in PATHS or (use in HUB_NAMES and not _is_hub_name(value))
                yield use, place, is_path and _is_relative(value)


def _is_relative(value: Any) -> bool:
    name = value.partition("->")[0] if isinstance(value, str) else ""
    return name[:1] not in ("", "/", "~") and ("->" not in value or name.endswith(".py"))


def keys_in(raw: Mapping[str, Any], sections: Collection[str]) -> Iterator[tuple[str, str, Any]]:
    """The keys of such a configuration that are not Flywheel's own: those beside the root, then those below it in the
    order of the tables. Each has its path in the file, its path below the root (or beside it), and its value."""
    for key, value in raw.items():
        if key not in (*sections, *MARKERS):
            yield from ((place, place, inner) for place, inner in leaves(value, str(key), lists=False))
    prefix, (place, _) = f"task_reader.{SECTION}", section_in(raw) or ("", None)
    order = {key: number for number, key in enumerate(_BELOW)}
    found = dict(leaves(_settings(raw), lists=False))
    for key in sorted(found, key=lambda each: order.get(each, len(order))):
        is_section = key.startswith(f"{prefix}.")
        yield place + key.removeprefix(prefix) if is_section else f"{_root(raw)}.{key}", key, found[key]


def section_in(raw: Any) -> tuple[str, Any] | None:
    """The path and content of `feedback_tracing`; None for other configurations."""
    if not isinstance(raw, Mapping):
        return None
    if SECTION in raw:
        return SECTION, raw[SECTION]
    if not (root := _root(raw)):
        return None
    reader = _mapping(raw[root].get("task_reader"))
    if SECTION in reader:
        return f"{root}.task_reader.{SECTION}", reader[SECTION]
    return f"{root}.{SECTION}", raw[root].get(SECTION)


def _root(raw: Mapping[str, Any]) -> str:
    """The root's key; empty for a bare `feedback_tracing`."""
    return next((root for root in ROOTS if isinstance(raw.get(root), Mapping)), "")


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What is below the root, with `feedback_tracing` in `task_reader` wherever it stands."""
    below = {key: value for key, value in _mapping(raw.get(_root(raw))).items() if key != SECTION}
    if (located := section_in(raw)) is not None and located[1] is not None:
        below["task_reader"] = {**_mapping(below.get("task_reader")), SECTION: located[1]}
    return below


def _why_unused(key: str) -> str:
    """The reason in the row of a key, or of a section around it."""
    row = key
    while row and row not in _ROWS:
        row = row.rpartition(".")[0]
    if row:
        return _ROWS[row].why
    close = difflib.get_close_matches(key, _BELOW, n=1, cutoff=0.8)
    return f"AgentJet documents no such key{f'; did you mean `{close[0]}`?' if close else ''}"


def _workflow(settings: Mapping[str, Any]) -> Any:
    rollout = _mapping(settings.get("rollout"))
    return next((rollout[key] for key in WORKFLOW_KEYS if rollout.get(key)), None)


def _program(
    settings: Mapping[str, Any], config: Mapping[str, Any], own: Any, root: str, attempted: str
) -> dict[str, Any]:
    """The settings of a workflow, which rewards itself or has a judge class for that; `config` is what both can read.
    Raises ConfigError."""
    workflow, judge = _workflow(settings), _mapping(settings.get("task_judge")).get("judge_protocol")
    if not workflow and not (judge and isinstance(own, Mapping)):
        if judge:
            raise ConfigError(
                attempted,
                f"`{root}.task_judge.judge_protocol` judges a workflow's answers, and there is no workflow",
                f"Add `{root}.rollout.user_workflow`, or remove the judge: `filter.rubric` judges other answers.",
            )
        return {}
    return {
        **({"agent": {"workflow": workflow, "config": config}} if workflow else {}),
        "reward": {"rubric": 0, "workflow": 1},
        **({"reward_function": judge} if judge else {}),
    }


def _loops(given: Mapping[str, Any], made: dict[str, Any], place: str, name: str) -> None:
    """What a rollout gets whose message loops."""
    keys = ("compute_madness_checklist", "agent_madness_reward")
    if all(given.get(key) is None for key in keys):
        return
    checks, reward = (
        value if (value := given.get(key)) is not None else USED[f"rollout.{key}"].default[at]
        for at, key in enumerate(keys)
    )
    checks = checks if isinstance(checks, list) else [checks]
    put(made, "rollout.loop_reward", reward if LOOPS in checks else None)
    for each in checks:
        if each != LOOPS:
            why = "loops are looked for, and a workflow or a rubric may check the rest"
            log.warning("%s: without effect: %s.%s %s: %s", name, place, keys[0], each, why)


def _trainer_common(given: Mapping[str, Any], made: dict[str, Any], place: str, name: str) -> None:
    """The KL term, checkpoints, and where numbers of steps are sent."""
    if isinstance(every := given.get("save_freq"), int) and every > 0:
        put(made, "training.save_steps", every)
    if {"use_kl_loss", "kl_loss_coef"} & {key for key, value in given.items() if value is not None}:
        is_used, coefficient = USED["trainer_common.kl_loss_coef"].default
        is_used = given.get("use_kl_loss", is_used)
        put(made, "training.beta", given.get("kl_loss_coef", coefficient) if is_used else 0)
    loggers = given.get("logger") or []
    loggers = loggers if isinstance(loggers, list) else [loggers]
    known = [each for each in loggers if isinstance(each, str) and each in TRACKER_PACKAGES]
    # Usual files name SwanLab, also those of people who do not have it.
    if trackers := [each for each in known if importlib.util.find_spec(TRACKER_PACKAGES[each]) is not None]:
        put(made, "tracking.report_to", trackers)
    for each in loggers:
        if each not in (*trackers, "console"):
            why = f"{TRACKER_PACKAGES[each]} is not installed, and " if each in known else ""
            log.warning(
                "%s: without effect: %s.logger %s: %s`metrics.jsonl` of each round has the numbers",
                name, place, each, why,
            )  # fmt: skip


def _sources_of(reader: Mapping[str, Any], kind: Any, path: Any, root: str, attempted: str) -> list[dict[str, Any]]:
    """The sources of `task_reader`; `path` is that of traces. Raises ConfigError."""
    if kind == TRACING:
        return [{"path": path} if path else {}]
    section = _mapping(reader.get(kind)) if isinstance(kind, str) else {}
    if kind in LINES:
        place = f"{root}.task_reader.{kind}.training.file_path"
        file = _mapping(section.get("training")).get("file_path") or section.get("file_path") or section.get("path")
        made = [{"type": "jsonl", "path": file}]
    elif kind == HUB:
        place, file = f"{root}.task_reader.{HUB}.dataset_path", _placed(section.get("dataset_path"))
        names = section.get("training_split", "train"), section.get("validation_split", "validation")
        made = [
            {"type": "jsonl", "dataset": {"path": file, "split": name}, "split": split}
            for name, split in zip(names, ("train", "held-out"), strict=True)
            if name is not None
        ]
    else:
        raise ConfigError(
            attempted,
            f"`{root}.task_reader.type` is {kind}, which Flywheel does not take",
            f"It reads {', '.join((TRACING, *LINES, HUB))}. Write such tasks as JSON lines, or trace the agent.",
        )
    if not file:
        raise ConfigError(attempted, f"`{place}` is missing: nothing says where the tasks are", "Add it.")
    return made


def _placed(name: Any) -> Any:
    """A name of the Hub or a path. One with more parts than a name of the Hub is a path, as in AgentJet."""
    return f"./{name}" if isinstance(name, str) and not _is_hub_name(name) and name[:1] not in "/~." else name


def _is_hub_name(name: Any) -> bool:
    return isinstance(name, str) and name.count("/") < 2 and name[:1] not in ("/", "~", ".")


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What workflows and judges of AgentJet read: the settings of a file, whose root is `ajet`, over AgentJet's
    documented defaults, as JSON has them (dates are texts)."""
    defaults: dict[str, Any] = {}
    for names, option in (COPIED | MADE | UNUSED).items():
        keys = names_in(names)
        values = option.default if isinstance(option.default, tuple) else (option.default,) * len(keys)
        for key, value in zip(keys, values, strict=True):
            put(defaults, key, value)
    made: dict[str, Any] = json.loads(json.dumps(merged({ROOTS[0]: defaults}, config), default=str))
    return made


def fit_engines(rollout: dict[str, Any], names: tuple[str, str], name: str) -> None:
    """Make engines and GPUs per engine as few as the machine has GPUs for: the file `name`, which calls them `names`,
    was written for another one."""
    asked = rollout.get("engines", 1), rollout.get("tensor_parallel", 1)
    fit = asked
    if all(type(each) is int and each > 0 for each in asked) and asked != (1, 1):
        fit = fitted(*asked, gpus := gpus_of_machine())
    if fit != asked:
        log.warning(
            "%s: it asks for %s %d and %s %d; this machine has %s, and rounds use %d and %d",
            name, names[0], asked[0], names[1], asked[1], quantity(gpus, "GPU"), *fit,
        )  # fmt: skip
    for key, value in zip(("engines", "tensor_parallel"), fit, strict=True):
        rollout.pop(key, None)
        if value != 1:
            rollout[key] = value


def fitted(engines: int, size: int, gpus: int) -> tuple[int, int]:
    """Number of engines and of GPUs of each, at most those asked for, of a machine with so many GPUs: the largest
    engines that fit beside the trainer, then as many as fit. The size stays a divisor of the one asked for, because
    it must divide the model's heads."""
    size = max(each for each in range(1, size + 1) if size % each == 0 and (each == 1 or each < gpus))
    return max(1, min(engines, (gpus - 1) // size)), size


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
