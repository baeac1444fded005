"""The files of a round directory, as the worker uses them: specification, completeness, and clean-up of unfinished
work."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.errors import FlywheelError, TrainError
from flywheel.records.round import (
    ADAPTER_DIR,
    ANSWERS_FILE,
    ERROR_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    OLD_ROLLOUTS_FILE,
    RESULT_FILE,
    ROLLOUTS_DIR,
    SELECTION_FILE,
    SPEC_FILE,
    RoundResult,
    RoundSpec,
)
from flywheel.system.files import file_sha256, json_line, tree_sha256, write_atomic, write_json
from flywheel.system.python_files import code_files
from flywheel.system.yaml_file import explain
from flywheel.training.data.graded_rollouts import PARTIAL_FILE
from flywheel.training.data.round_progress import PROGRESS_FILE, read_steps
from flywheel.training.data.stages import STAGES_DIR, TRAINED_FILE

SYNC_DIR = "sync"
"""Adapters of single steps, which earlier versions left."""
CHECKPOINTS_DIR = "checkpoints"
"""In the folder of a stage."""
VERSION: Final = "version"
FORMAT: Final = "format of the files"
FORMAT_NUMBER: Final = 3
"""Of the files that a further worker goes on with; it is 1 where `identity.json` has none. A change of them that an
earlier worker's files do not have counts it up."""
REWARD_FILE = "reward.json"
"""Which reward counts, as the first run of the user's agent has decided."""
IDENTITY_FILE = "identity.json"
"""Hashes of what the round does. A worker that is started again goes on only if they are the same."""
END_FILE = "end-at-checkpoint"
"""Asks a worker to end at its next checkpoint."""
OF_WORKER = (
    ANSWERS_FILE,
    END_FILE,
    EVALUATION_FILE,
    PROGRESS_FILE,
    RESULT_FILE,
    ERROR_FILE,
    ADAPTER_DIR,
    SYNC_DIR,
    f".{ADAPTER_DIR}.new",
)
"""What each worker makes anew."""
KEPT = (
    SELECTION_FILE, METRICS_FILE, ROLLOUTS_DIR, PARTIAL_FILE, STAGES_DIR, REWARD_FILE,
    OLD_ROLLOUTS_FILE, "rollouts.index.jsonl", IDENTITY_FILE,
)  # fmt: skip
"""What a worker that is started again goes on with; of an earlier format, what it removes."""
NO_CHANGE: Final[Mapping[str, frozenset[str]]] = {
    "judge": frozenset(
        {"budget", "prices", "max_thread", "timeout_seconds", "max_attempts", "response_format", "omit"}
    ),
    "training": frozenset({"save_steps", "judge_wait_seconds", "max_undecided_share", "max_uses"}),
}
"""Settings with which a round may go on when they have changed."""


def read_spec(directory: Path) -> RoundSpec:
    path = directory / SPEC_FILE
    try:
        return RoundSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        why = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise TrainError(f"read {path}", why, "The daemon writes this file; start a round with `flywheel round`.")


def settings_of(spec: RoundSpec) -> Config:
    try:
        return Config.model_validate(spec.settings)
    except ValidationError as error:
        raise TrainError(
            f"use the settings of {spec.round_id}",
            explain(error, Config),
            "Worker and daemon are of different versions; restart the daemon.",
        ) from None


def finished(directory: Path, spec: RoundSpec) -> bool:
    """Whether the directory already holds this round's whole result, adapter included."""
    try:
        result = RoundResult.model_validate_json((directory / RESULT_FILE).read_bytes())
    except (OSError, ValidationError):
        return False
    if result.round_id != spec.round_id:
        return False
    return result.adapter is None or tree_sha256(Path(result.adapter.path)) == result.adapter.sha256


def go_on(directory: Path, spec: RoundSpec) -> str:
    """Prepare the directory for a worker: remove what an earlier one left unfinished, and all of it if that was doing
    something else. Returns what has changed since then, see `changes`."""
    found, identity = _identity(directory), identity_of(spec)
    is_same = found == identity and not spec.debug
    _remove(directory, OF_WORKER if is_same else (*OF_WORKER, *KEPT))
    if (directory / METRICS_FILE).exists():
        # Phases are those of the worker that runs.
        write_atomic(directory / METRICS_FILE, b"".join(map(json_line, read_steps(directory))))
    for folder in (directory / STAGES_DIR).glob("*"):
        if not (folder / TRAINED_FILE).exists():
            _remove(folder, (ADAPTER_DIR,))
    write_json(directory / IDENTITY_FILE, {**identity, VERSION: __version__})
    return _changed(found, identity, spec)


def changes(directory: Path, spec: RoundSpec) -> str:
    """The parts of a round that have changed since its last worker, so that the next one starts over; empty if that
    goes on, is the first, or makes a debug round, which always starts over."""
    return _changed(_identity(directory), identity_of(spec), spec)


def _changed(found: Mapping[str, Any], identity: Mapping[str, Any], spec: RoundSpec) -> str:
    if not found or spec.debug:
        return ""
    return ", ".join(name for name in {**identity, **found} if found.get(name) != identity.get(name))


def version_of(directory: Path) -> str | None:
    """The version of Flywheel of the round's last worker; None if unknown."""
    return _read_identity(directory).get(VERSION)


def has_format(directory: Path) -> bool:
    """Whether a worker of this version can go on with the files of the round's last worker."""
    return _read_identity(directory).get(FORMAT) == FORMAT_NUMBER


def is_of(directory: Path, spec: RoundSpec) -> bool:
    """Whether a worker would go on with what is in the directory."""
    return _identity(directory) == identity_of(spec)


def _identity(directory: Path) -> dict[str, Any]:
    return {name: value for name, value in _read_identity(directory).items() if name != VERSION}


def _read_identity(directory: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / IDENTITY_FILE).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def identity_of(spec: RoundSpec) -> dict[str, Any]:
    """Hashes of the parts of a round that its rollouts and its weights depend on, and the format of its files. The
    files of the user's agent have their paths as names."""
    named = ("model", "training", "rollout", "judge", "gate", "serving")
    settings = {
        section: {
            name: value for name, value in spec.settings[section].items() if name not in NO_CHANGE.get(section, ())
        }
        for section in named
        if section in spec.settings
    }
    made = spec.model_dump(mode="json")
    parts = {
        "base model": [spec.base_model, spec.seed],
        "parent": [made["parent"], made["frozen"]],
        "tasks": [made[name] for name in ("train", "held_out", "left_out", "shared", "shared_gate", "suites")],
        "rubric": spec.rubric,
        "settings": settings,
        **({"candidate": made["candidate"]} if spec.candidate is not None else {}),
    }
    files = {str(file): file_sha256(file) for file in sorted(code_of(spec.settings.get("rollout", {})))}
    return {
        FORMAT: FORMAT_NUMBER,
        **{name: sha256(json_line(part)).hexdigest() for name, part in parts.items()},
        **files,
    }


def code_of(rollout: Mapping[str, Any]) -> set[Path]:
    """The files of the user's agent and of its further functions; none without one."""
    if not isinstance(agent := rollout.get("agent"), Mapping):
        return set()
    functions = (agent.get("workflow"), rollout.get("reward_function"), rollout.get("setup"))
    return code_files(filter(None, functions), agent.get("command") or (), Path(agent.get("folder", "")))


def clear(directory: Path, *, is_over: bool) -> None:
    """Remove files that only a running worker needs. Once the round is over, also what a further worker would go on
    with."""
    _remove(directory, (SYNC_DIR, f".{ADAPTER_DIR}.new"))
    if is_over:
        _remove(directory, (PARTIAL_FILE, REWARD_FILE, IDENTITY_FILE))
        for folder in (directory / STAGES_DIR).glob("*"):
            _remove(folder, (CHECKPOINTS_DIR,))


def _remove(directory: Path, names: Iterable[str]) -> None:
    for path in (directory / name for name in names):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_error(directory: Path, error: FlywheelError) -> None:
    """Write the reason why there is no result, if the disk permits."""
    words = {
        "error": f"cannot {error.attempted}: {error.why}",
        "hint": error.hint,
        "retryable": error.retryable,
        "exit_code": error.exit_code,
    }
    with contextlib.suppress(OSError):
        write_json(directory / ERROR_FILE, words)
