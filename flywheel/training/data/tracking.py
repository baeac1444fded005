"""Sends a round to one experiment tracker: `python -P -m flywheel.training.data.tracking ROUND_DIR NAME SECONDS`.

A process of its own for each tracker: one that hangs, or waits for a network, holds up neither a step nor the daemon.
It follows `metrics.jsonl` until standard input ends. Then it sends what is left, and the gate's decision if there is
one, and has so many seconds for that. `NAME.json` in the round's tracking directory says what was sent: a process
that is started again goes on from there, in the same run.

The adapters use each tracker's own interface. Those of `accelerate.tracking` import torch, do not continue a run of
MLflow, and have no time of a step, by which MLflow recognises a figure that it has.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from flywheel.config.section import leaves
from flywheel.records.round import RoundSpec
from flywheel.secrets import redact_secrets, without_secrets
from flywheel.system.files import write_atomic
from flywheel.training.data.round_directory import read_spec, settings_of
from flywheel.training.data.round_progress import read_steps

DECISION_FILE: Final = "decision.json"
"""The gate's decision on a round, in its tracking directory."""
POLL_SECONDS: Final = 2.0
SETTINGS: Final = ("model", "training", "rollout", "gate")
"""The sections of the settings that a run is described by."""
QUIET: Final = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "false",
}
"""What trackers tell their makers is off, unless the user turns it on."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a tracker. Files of this run go to `folder`, those of all runs to the folder above."""

    id: str
    name: str
    project: str
    folder: Path
    settings: Mapping[str, Any]


class Tracker(NamedTuple):
    """An open run: what takes the figures of a step, with its time; what takes the decision; what ends the run."""

    log: Callable[[Mapping[str, float], int, datetime], object]
    decide: Callable[[Mapping[str, Any]], object]
    finish: Callable[[], object]


def _tensorboard(run: Run) -> Tracker:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar, text

    # Not its SummaryWriter, whose `flush` does not wait for the thread that writes.
    writer = EventsWriter(str(run.folder / "events"), f".{os.getpid()}")

    def write(summary: Any, step: int, at: float) -> None:
        writer.write_event(Event(wall_time=at, step=step, summary=summary))
        writer.flush()

    def add_text(name: str, values: Mapping[str, Any]) -> None:
        write(text(name, "\n".join(f"    {key}: {value}" for key, value in values.items())), 0, time.time())

    def log(figures: Mapping[str, float], step: int, at: datetime) -> None:
        for name, value in figures.items():
            write(scalar(name, value), step, at.timestamp())

    add_text("settings", run.settings)
    return Tracker(log, lambda decision: add_text("gate", decision), writer.close)


def _mlflow(run: Run) -> Tracker:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.parent}/mlflow.db")
    found = client.get_experiment_by_name(run.project)
    experiment = found.experiment_id if found is not None else client.create_experiment(run.project)
    begun = client.search_runs([experiment], f"tags.`flywheel.run` = '{run.id}'")
    tags = {"flywheel.run": run.id}
    made = begun[0] if begun else client.create_run(experiment, tags=tags, run_name=run.name)
    known, of = made.data.params, made.info.run_id
    params = [Param(key, str(value)) for key, value in run.settings.items() if key not in known]
    for first in range(0, len(params), 100):  # It takes no more at once.
        client.log_batch(of, params=params[first : first + 100])

    def log(figures: Mapping[str, float], step: int, at: datetime) -> None:
        named = {re.sub(r"[^/\w.\- :]", "_", name): value for name, value in figures.items()}
        moment = int(at.timestamp() * 1000)
        client.log_batch(of, metrics=[Metric(name, value, moment, step) for name, value in named.items()])

    def decide(decision: Mapping[str, Any]) -> None:
        client.log_batch(of, tags=[RunTag(name, str(value)) for name, value in decision.items()])

    return Tracker(log, decide, lambda: client.set_terminated(of))


def _like_wandb(name: str, decide: str, arguments: Callable[[Run], dict[str, Any]]) -> Callable[[Run], Tracker]:
    """W&B and the trackers with its interface; the method `decide` of their runs takes the decision."""

    def begin(run: Run) -> Tracker:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder.parent / "trackio"))  # It is read at the import.
        about = {"project": run.project, "name": run.name, "config": dict(run.settings), "resume": "allow"}
        made = importlib.import_module(name).init(**{**about, **arguments(run)})
        log: Callable[..., object] = made.log
        return Tracker(lambda figures, step, _: log(figures, step=step), attrgetter(decide)(made), made.finish)

    return begin


# They describe the machine and its files unless told otherwise.
_WANDB: Final = {
    "console": "off", "silent": True, "disable_git": True, "save_code": False, "x_disable_stats": True,
    "x_disable_meta": True, "x_save_requirements": False,
}  # fmt: skip
_PROBES: Final = ("hardware", "runtime", "requirements", "git", "monitor")
TRACKERS: Final[Mapping[str, Callable[[Run], Tracker]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _like_wandb(
        "wandb", "summary.update", lambda run: {"id": run.id, "dir": str(run.folder), "settings": _WANDB}
    ),
    "swanlab": _like_wandb(
        "swanlab",
        "config.update",
        lambda run: {
            "id": run.id,
            "log_dir": str(run.folder),
            "settings": {"interactive": False, "probe": dict.fromkeys(_PROBES, False)},
        },
    ),
    "trackio": _like_wandb(
        "trackio",
        "log",
        # It has no id of ours: its runs are continued by name.
        lambda run: {"name": f"{run.name}-{run.id}", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False},
    ),
}


class Sent(BaseModel):
    """What a tracker has of a round. `began` is the time of the first step: a round that starts over is a new run."""

    run: str
    began: str = ""
    step: int = 0
    decision: dict[str, Any] = {}

    @classmethod
    def read(cls, path: Path, began: str) -> Sent:
        found = cls.model_validate_json(path.read_bytes()) if path.exists() else None
        if found is None or found.began not in ("", began):
            return cls(run=secrets.token_hex(8), began=began)
        return found.model_copy(update={"began": began})

    def write(self, path: Path) -> None:
        write_atomic(path, self.model_dump_json().encode())


def follow(directory: Path, name: str, over: threading.Event) -> None:
    """Send the steps of the round in `directory` while they are written and, once the event is set, what is left.
    Raises what the tracker raises, FlywheelError and OSError."""
    spec = read_spec(directory)
    tracking = settings_of(spec).tracking
    assert tracking.dir is not None
    folder, path = tracking.dir, tracking.dir / f"{name}.json"
    tracker: Tracker | None = None
    sent: Sent | None = None
    settings = described(spec)
    with (folder / f"{name}.lock").open("a") as lock:
        # That of an earlier daemon may be sending its last steps.
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_last = False
        while not is_last:
            is_last = over.wait(POLL_SECONDS if sent is not None else 0)
            steps = read_steps(directory)
            before, sent = sent, Sent.read(path, steps[0]["at"] if steps else "")
            if tracker is not None and before is not None and before.run != sent.run:
                tracker.finish()
                tracker = None
            decision = read_decision(folder) if is_last else {}
            new = [line for line in steps if line["step"] > sent.step]
            if tracker is None and (new or decision not in ({}, sent.decision)):
                sent.write(path)
                tracker = TRACKERS[name](Run(sent.run, spec.round_id, tracking.project, folder, settings))
            for line in new:
                assert tracker is not None
                tracker.log(figures_of(line), line["step"], datetime.fromisoformat(line["at"]))
                sent.step = line["step"]
                sent.write(path)
            if tracker is not None and decision not in ({}, sent.decision):
                tracker.decide({f"gate.{name}": value for name, value in decision.items()})
                sent.decision = decision
                sent.write(path)
        if tracker is not None:
            tracker.finish()


def described(spec: RoundSpec) -> dict[str, Any]:
    """What a run says of its round: settings by name (`training.lora.r`), without what may be a secret."""
    from flywheel.judge.rubric.file import parse_rubric

    rubric = parse_rubric(spec.rubric, f"the rubric of {spec.round_id}").hash if spec.rubric else None
    parent, sections = spec.parent, {name: spec.settings.get(name) for name in SETTINGS}
    about = {"seed": spec.seed, "parent": parent and parent.name, "target": spec.target, "rubric": rubric}
    counts = {"train": len(spec.train), "held_out": len(spec.held_out)}
    return {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in leaves(without_secrets({**sections, **about, "tasks": counts}), lists=False)
    }


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step, from its line in the metrics; those of nested mappings are named `outer/inner`."""
    figures = leaves(
        {key: value for key, value in line.items() if key not in ("step", "steps")}, mark="/", lists=False
    )
    return {name: float(value) for name, value in figures if isinstance(value, int | float)}


def read_decision(folder: Path) -> dict[str, Any]:
    """The decision on the round of a tracking directory; empty while there is none."""
    path = folder / DECISION_FILE
    decision: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return decision


def main(directory: Path, name: str, seconds: int) -> int:
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        over.set()
        # The kernel ends this process, whatever it does then.
        signal.alarm(seconds)

    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        follow(directory, name, over)
    except (Exception, SystemExit) as error:
        print(redact_secrets(f"{type(error).__name__}: {' '.join(str(error).split())}"), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os.umask(0o077)
    # Handlers of trackers at the exit may hang.
    os._exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
