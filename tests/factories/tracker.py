"""What trackers have of runs, read from their files."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OFFLINE = {"WANDB_MODE": "offline"}


@dataclass
class Tracked:
    """What a tracker has: of each run by id its name, settings, figures by step, and decision."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    decision: dict[str, Any] = field(default_factory=dict)


def in_mlflow(folder: Path) -> dict[str, Tracked]:
    """From its database."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as db:
        found = {}
        for run, name in db.execute("SELECT run_uuid, name FROM runs"):
            made = found[run] = Tracked(name)
            made.settings = dict(db.execute("SELECT key, value FROM params WHERE run_uuid = ?", [run]))
            of_steps: dict[int, dict[str, float]] = {}
            for step, key, value in db.execute("SELECT step, key, value FROM metrics WHERE run_uuid = ?", [run]):
                assert key not in of_steps.setdefault(step, {}), "twice"
                of_steps[step][key] = value
            made.steps = sorted(of_steps.items())
            tags = dict(db.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [run]))
            made.decision = {name[5:]: value for name, value in tags.items() if name.startswith("gate.")}
    return found


READ_WANDB = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
for path in sys.argv[1:]:
    data, whole = open(path, "rb").read(), b""
    at = 7  # Behind the file's mark; then blocks of 32 KiB with chunks: checksum, length, kind.
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        whole += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4) and size:
            record, whole = Record.FromString(whole), b""
            what = record.WhichOneof("record_type")
            if what == "run":
                config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                print(json.dumps(["run", record.run.run_id, record.run.display_name, config]))
            elif what in ("history", "summary"):
                items = record.history.item if what == "history" else record.summary.update
                values = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items}
                print(json.dumps([what, record.history.step.num if what == "history" else None, values]))
"""


def in_wandb(folder: Path) -> dict[str, Tracked]:
    """From the files of its offline runs."""
    files = sorted(map(str, folder.glob("*/wandb/offline-run-*/run-*.wandb")))
    out = subprocess.run(
        [sys.executable, "-c", READ_WANDB, *files], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, Tracked] = {}
    made = Tracked()
    for what, first, *more in map(json.loads, out.splitlines()):
        if what == "run":
            made = found.setdefault(first, Tracked(more[0]))
            made.settings |= {name: value for name, value in more[1].items() if name != "_wandb"}
        elif what == "history":
            figures = {name: value for name, value in more[0].items() if not name.startswith("_")}
            made.steps.append((first, figures))
        else:
            made.decision |= {name[5:]: value for name, value in more[0].items() if name.startswith("gate.")}
    return found


def events_of(data: bytes) -> Iterator[Any]:
    """The records of a TFRecord file: a length, its checksum, the message and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def in_tensorboard(folder: Path) -> dict[str, Tracked]:
    """From its event files; a run is a folder."""
    found = {}
    for run in folder.iterdir():
        if files := sorted(run.glob("events.out.tfevents.*")):
            made = found[run.name] = Tracked(run.name)
            of_steps: dict[int, dict[str, float]] = {}
            events = [event for file in files for event in events_of(file.read_bytes())]
            for step, value in ((event.step, value) for event in events for value in event.summary.value):
                if value.HasField("simple_value"):
                    assert value.tag not in of_steps.setdefault(step, {}), "twice"
                    of_steps[step][value.tag] = value.simple_value
                    continue
                [text] = value.tensor.string_val
                pairs = (line.lstrip().partition(": ") for line in text.decode().splitlines())
                values = {key: shown for key, _, shown in pairs}
                if value.tag.startswith("settings"):
                    made.settings = values
                else:
                    made.decision = {key[5:]: value for key, value in values.items()}
            made.steps = sorted(of_steps.items())
    return found


READERS: dict[str, Callable[[Path], dict[str, Tracked]]] = {
    "mlflow": in_mlflow,
    "wandb": in_wandb,
    "tensorboard": in_tensorboard,
}


def same(found: Sequence[tuple[int, Mapping[str, float]]], wanted: Sequence[tuple[int, Mapping[str, float]]]) -> bool:
    """TensorBoard has numbers of 32 bits."""
    return [step for step, _ in found] == [step for step, _ in wanted] and all(
        figures == pytest.approx(dict(other)) for (_, figures), (_, other) in zip(found, wanted, strict=True)
    )
