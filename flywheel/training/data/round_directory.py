"""The files of a round directory, as the worker uses them: specification, completeness, and clean-up of unfinished
work."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flywheel.config import Config
from flywheel.errors import FlywheelError, TrainError
from flywheel.records.round import (
    ADAPTER_DIR,
    ERROR_FILE,
    EVALUATION_FILE,
    METRICS_FILE,
    RESULT_FILE,
    ROLLOUT_INDEX_FILE,
    ROLLOUTS_FILE,
    SPEC_FILE,
    RoundResult,
    RoundSpec,
)
from flywheel.system.files import tree_sha256, write_atomic, write_json
from flywheel.system.yaml_file import explain
from flywheel.training.data.round_progress import PROGRESS_FILE
from flywheel.training.data.stages import STAGES_DIR

SYNC_DIR = "sync"
"""Adapters of single steps, which the engines load."""
TRL_DIR = "trl"
"""TRL's output directory, which stays empty."""
SCRATCH = (SYNC_DIR, TRL_DIR, f".{ADAPTER_DIR}.new")
"""Files that only a running worker needs."""
PARTS = (
    PROGRESS_FILE,
    ROLLOUTS_FILE,
    ROLLOUT_INDEX_FILE,
    EVALUATION_FILE,
    RESULT_FILE,
    ERROR_FILE,
    ADAPTER_DIR,
    *SCRATCH,
)


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


def start_over(directory: Path) -> None:
    """Remove the unfinished files of an earlier worker. Of stages that have ended, adapters and metrics stay."""
    ended = {path.parent.name.partition("-")[2] for path in (directory / STAGES_DIR).glob(f"*/{ADAPTER_DIR}")}
    metrics = directory / METRICS_FILE
    if metrics.exists():
        lines = [
            line for line in metrics.read_bytes().splitlines(keepends=True) if _measured(line).get("stage") in ended
        ]
        write_atomic(metrics, b"".join(lines))
    for name in PARTS:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def steps_of_stage(directory: Path, stage: str) -> int:
    """How many steps a stage that has ended took."""
    with contextlib.suppress(FileNotFoundError):
        lines = map(_measured, (directory / METRICS_FILE).read_bytes().splitlines())
        return sum(line.get("event") == "step" and line.get("stage") == stage for line in lines)
    return 0


def _measured(line: bytes) -> dict[str, Any]:
    """A line of the metrics; empty if it was not written whole."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def clear(directory: Path) -> None:
    """Remove files that only a running worker needs: two step adapters matter on a full disk."""
    for name in SCRATCH:
        shutil.rmtree(directory / name, ignore_errors=True)


def write_error(directory: Path, error: FlywheelError) -> None:
    """Write the reason why there is no result, if the disk permits."""
    words = {
        "error": f"cannot {error.attempted}: {error.why}",
        "hint": error.hint,
        "retryable": error.retryable,
    }
    with contextlib.suppress(OSError):
        write_json(directory / ERROR_FILE, words)
