"""Configurations of AgentJet or ASTuner, translated to Flywheel's keys.

The section `feedback_tracing` (at the root, or in `task_reader` below `ajet` or `astuner`) has Studio's database, the
task file, the judge's model and its parameters. Below the root, `model.path` is the trained model, `rollout` has the
number and temperature of rollouts and the workflow that runs in them, and `task_judge` the class that rewards it.
Other keys are for other programs and ignored.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from flywheel.config.section import merged
from flywheel.errors import ConfigError

log = logging.getLogger(__name__)

ROOTS: Final = ("ajet", "astuner")
SECTION: Final = "feedback_tracing"
MARKERS: Final = frozenset((*ROOTS, SECTION))
"""Root keys that identify such a configuration."""
SECTION_KEYS: Final = (
    "base_url",
    "train_output_path",
    "alien_llm_model",
    "alien_llm_response_length",
    "filters",
    "train_ratio",
    "split_seed",
)
TRACING: Final = "tracing"
LINES: Final = ("jsonl", "jsonl_dataset_file", "dataset_file")
"""The types of `task_reader` that read files of tasks; below a key of that name, `training.file_path` is the file."""
WORKFLOW_KEYS: Final = ("user_workflow", "agentscope_workflow", "agentscope_learn_protocol")
"""The names that the workflow's key has had, the present one first."""
USED_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("path",),
    "rollout": ("num_repeat", "temperature", *WORKFLOW_KEYS),
    "task_judge": ("judge_protocol",),
    "trainer_common": ("algorithm",),
}
"""The used keys of the sections below the root, besides `task_reader`; `algorithm` in `flywheel.config.sage`."""


def section_in(raw: Any) -> tuple[str, Any] | None:
    """The path and content of the section; None for other configurations."""
    if not isinstance(raw, Mapping):
        return None
    if SECTION in raw:
        return SECTION, raw[SECTION]
    for root in ROOTS:
        if isinstance(below := raw.get(root), Mapping):
            reader = below.get("task_reader")
            if isinstance(reader, Mapping) and SECTION in reader:
                return f"{root}.task_reader.{SECTION}", reader[SECTION]
            return f"{root}.{SECTION}", below.get(SECTION)
    return None


def filters_in(raw: Any) -> Any:
    """The filters of such a configuration as a chain; other values of `raw` unchanged."""
    located = section_in(raw)
    if located is None or not isinstance(located[1], Mapping):
        return raw
    return {"version": 1, "id": "agentjet", "filters": located[1].get("filters") or []}


def from_agentjet(
    raw: Mapping[str, Any], sections: Collection[str], name: str, file: Path | None
) -> Mapping[str, Any]:
    """Such a configuration in Flywheel's keys; other configurations unchanged. Raises ConfigError.

    `sections` are Flywheel's own sections, which may also be present and take precedence.
    """
    located = section_in(raw)
    if located is None:
        return raw
    place, section = located
    attempted = f"use configuration {name}"
    root = place.partition(".")[0]
    below = raw[root] if root in ROOTS else {}
    lines = _lines_of(_mapping(below.get("task_reader")), f"{root}.task_reader", attempted)
    if lines is not None and section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            attempted, f"`{place}` is missing: nothing says where the traces are", "Add it, with a `base_url`."
        )
    if unknown := [str(key) for key in section if key not in SECTION_KEYS]:
        close = difflib.get_close_matches(unknown[0], SECTION_KEYS, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(SECTION_KEYS)}"
        raise ConfigError(attempted, f"unknown key `{place}.{unknown[0]}` ({meant})", "Correct the file.")
    _warn_of_unused(raw, sections, place, name)
    own = {key: value for key, value in raw.items() if key in sections}
    model, rollout = _mapping(below.get("model")), _mapping(below.get("rollout"))
    base = _present({"base": model.get("path")}, own.get("model"))
    if isinstance(base, Mapping) and not base.get("base"):
        key = f"{root}.model.path" if below else "model.base"
        raise ConfigError(
            attempted,
            f"`{key}` is missing: nothing says which model is trained",
            "Add it: `model: {base: MODEL}` at the root.",
        )
    return {
        **own,
        "sources": own.get("sources", [lines or _present({"path": section.get("base_url")})]),
        "model": base,
        "training": _present({"group_size": rollout.get("num_repeat")}, own.get("training")),
        "rollout": merged(
            _present({"temperature": rollout.get("temperature"), **_program(raw, root, sections, file, attempted)}),
            _mapping(own.get("rollout")),
        ),
        "ingest": _present(
            {
                "output": section.get("train_output_path"),
                "train_ratio": section.get("train_ratio"),
                "split_seed": section.get("split_seed"),
            },
            own.get("ingest"),
        ),
        "judge": _present(
            {"model": section.get("alien_llm_model"), "max_tokens": section.get("alien_llm_response_length")},
            own.get("judge"),
        ),
        "filter": _present({"chain": str(file) if file and section.get("filters") else None}, own.get("filter")),
    }


def _program(
    raw: Mapping[str, Any], root: str, sections: Collection[str], file: Path | None, attempted: str
) -> dict[str, Any]:
    """The settings of a workflow, which rewards itself or has a judge class for that. Raises ConfigError."""
    below = raw.get(root, {}) if root in ROOTS else {}
    rollout, own = _mapping(below.get("rollout")), _mapping(raw.get("rollout")).get("agent")
    workflow = next((rollout[key] for key in WORKFLOW_KEYS if rollout.get(key)), None)
    judge = _mapping(below.get("task_judge")).get("judge_protocol")
    if not workflow and not (judge and isinstance(own, Mapping)):
        if judge:
            raise ConfigError(
                attempted,
                f"`{root}.task_judge.judge_protocol` names a judge, and no workflow runs that it could judge",
                f"Add `{root}.rollout.user_workflow`, or remove the judge: a rubric needs no workflow.",
            )
        return {}
    folder = _project(str(workflow or judge), file.parent) if file is not None else Path()

    def placed(name: Any) -> Any:
        return str(folder / name) if isinstance(name, str) and ".py" in name else name

    # The root may have its earlier name. What else stands in the file, workflows read, too.
    settings = {ROOTS[0] if key == root else key: value for key, value in raw.items() if key not in sections}
    return {
        **({"agent": {"workflow": placed(workflow), "folder": str(folder), "config": settings}} if workflow else {}),
        "reward": {"rubric": 0, "workflow": 1},
        "reward_function": placed(judge),
    }


def _project(workflow: str, folder: Path) -> Path:
    """The folder in which a workflow's path or package is. AgentJet runs there, and its configurations are below."""
    first = Path(workflow).parts[0] if ".py" in workflow else workflow.partition("->")[0].partition(".")[0]
    folders = (folder, *folder.parents)
    return next((each for each in folders if (each / first).exists() or (each / f"{first}.py").exists()), folder)


def _lines_of(reader: Mapping[str, Any], place: str, attempted: str) -> Mapping[str, Any] | None:
    """The source of `task_reader` if it reads a file of tasks; None for traces. Raises ConfigError."""
    kind = reader.get("type", TRACING)
    if kind == TRACING:
        return None
    if kind not in LINES:
        raise ConfigError(
            attempted,
            f"`{place}.type` is {kind}, which Flywheel does not read",
            f"It reads {', '.join((TRACING, *LINES))}. Write such tasks to a file of JSON lines, or trace the agent.",
        )
    section = _mapping(reader.get(kind))
    path = _mapping(section.get("training")).get("file_path") or section.get("file_path") or section.get("path")
    if not path:
        raise ConfigError(
            attempted, f"`{place}.{kind}.training.file_path` is missing: nothing says where the tasks are", "Add it."
        )
    return {"type": "jsonl", "path": path}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _present(values: Mapping[str, Any], own: Any = None) -> Any:
    if own is not None and not isinstance(own, Mapping):
        return own  # validation reports it
    return {key: value for key, value in values.items() if value is not None} | dict(own or {})


def _warn_of_unused(raw: Mapping[str, Any], sections: Collection[str], place: str, name: str) -> None:
    root = place.partition(".")[0]
    rest = [str(key) for key in raw if key not in sections and key != root]
    if root in ROOTS:
        below = raw[root]
        reader = _mapping(below.get("task_reader"))
        used = {
            **USED_KEYS,
            "task_reader": (SECTION, "type", *([reader["type"]] if reader.get("type") in LINES else [])),
        }
        for key, value in below.items():
            if key in used and isinstance(value, Mapping):
                rest += [f"{root}.{key}.{inner}" for inner in value if inner not in used[key]]
            elif key not in ("task_reader", SECTION):
                rest.append(f"{root}.{key}")
    if rest:
        log.warning("%s: these keys are for another program and not used: %s", name, ", ".join(rest))
