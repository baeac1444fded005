"""Event files of TensorBoard have the numbers of each step."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.config import parse
from flywheel.training.data.round_progress import Metrics, TensorBoardEvents

FIGURES = {"reward_mean": 0.5, "loss": None, "why": "a text", "program": {"failures": {"timeout": 2}}}


def steps_in(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and numbers of each event of the only file."""
    (path,) = directory.glob("events.out.tfevents.*")
    return [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events_of(path.read_bytes())
        if event.summary.value
    ]


def events_of(data: bytes) -> Iterator[Any]:
    """The records of a TFRecord file: a length, its checksum, the message and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


@pytest.mark.training
def test_each_step_has_its_numbers(tmp_path: Path) -> None:
    events = TensorBoardEvents(tmp_path / "r0001")
    events.step(300, FIGURES)
    wanted = {"reward_mean": 0.5, "program/failures/timeout": 2.0}
    assert steps_in(tmp_path / "r0001") == [(300, wanted)], "a step is in the file when it has ended"
    events.step(301, {"large": 1e300, "none": math.nan})
    _, (step, figures) = steps_in(tmp_path / "r0001")
    assert (step, figures["large"], math.isnan(figures["none"])) == (301, math.inf, True)


@pytest.mark.training
def test_metrics_write_them_beside_their_lines(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, tmp_path / "events")
    metrics.step(300, 500, FIGURES)
    assert [step for step, _ in steps_in(tmp_path / "events")] == [300]
    assert json.loads(metrics.path.read_text())["program"] == {"failures": {"timeout": 2}}
    Metrics(tmp_path).step(301, 500, {})
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "events"}


@pytest.mark.training
def test_a_directory_that_cannot_be_written_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events").write_text("a file")
    metrics = Metrics(tmp_path, tmp_path / "events" / "r0001")
    with caplog.at_level(logging.WARNING):
        metrics.step(1, 2, FIGURES)
        metrics.step(2, 2, FIGURES)
    assert len(caplog.records) == 1
    assert "for training.tensorboard: Not a directory" in caplog.text
    assert len(metrics.path.read_text().splitlines()) == 2


def test_the_directory_is_relative_to_the_configuration(tmp_path: Path) -> None:
    config = parse({"training": {"tensorboard": "events"}}, "flywheel.yaml", tmp_path)
    assert config.training.tensorboard == tmp_path / "events"
    assert parse({}, "flywheel.yaml", tmp_path).training.tensorboard is None
