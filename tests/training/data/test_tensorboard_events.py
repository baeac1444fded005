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
from flywheel.errors import ConfigError
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
    assert "for tracking.report_to tensorboard: Not a directory" in caplog.text
    assert len(metrics.path.read_text().splitlines()) == 2


TENSORBOARD = {"report_to": ["tensorboard"]}


@pytest.mark.parametrize(
    ("tracking", "expected"),
    [
        ({}, None),
        ({"dir": "events"}, None),
        ({"report_to": ["console", "none"]}, None),
        ({"report_to": ["wandb"]}, None),
        (TENSORBOARD, "round/tracking/r0007"),
        ({**TENSORBOARD, "dir": "events"}, "events/r0007"),
        ({"report_to": ["wandb", "tensorboard"], "dir": "events"}, "events/r0007"),
    ],
)
def test_a_round_has_a_directory_of_its_own(tracking: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    config = parse({"tracking": tracking}, "flywheel.yaml", tmp_path)
    events = config.tracking.of_round("r0007", tmp_path / "round").events
    assert events == (tmp_path / expected if expected is not None else None)


@pytest.mark.parametrize(
    ("report_to", "words"),
    [
        (["tensorboard", "console", "none"], ""),
        (["wandb"], "nothing is sent to wandb yet; metrics.jsonl has the same figures"),
        (["swanlab", "tensorboard", "mlflow"], "nothing is sent to mlflow, swanlab yet; metrics.jsonl has"),
    ],
)
def test_what_comes_later_is_one_line(
    report_to: list[str], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse({"tracking": {"report_to": report_to}}, "flywheel.yaml", tmp_path)
    with caplog.at_level(logging.INFO):
        config.tracking.of_round("r0001", tmp_path)
    assert len(caplog.records) == bool(words)
    assert words in caplog.text


def test_another_tracker_is_an_error_that_lists_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"tracking": {"report_to": ["tensorbord"]}}, "flywheel.yaml", tmp_path)
    assert all(name in caught.value.why for name in ("tensorboard", "wandb", "mlflow", "swanlab", "not `tensorbord`"))
    with pytest.raises(ConfigError, match=r"use tracking\.dir"):
        parse({"training": {"tensorboard": "events"}}, "flywheel.yaml", tmp_path)
