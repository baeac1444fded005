"""Event files are, byte for byte, what TensorBoard's own writer makes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from flywheel.config import parse
from flywheel.training import tensorboard_events
from flywheel.training.metrics import Metrics
from flywheel.training.tensorboard_events import TensorBoardEvents

VERSION = "1800000000000000a37f4b22090000000000448f401a0d627261696e2e4576656e743a32aba33345"
START = "100000000000000095fbfe18090000000000448f4010ac023a020801e1133350"
STEP = (
    "4300000000000000b18525a0090000000000448f4010ac022a350a120a0b7265776172645f6d65616e150000003f"
    "0a1f0a1870726f6772616d2f6661696c757265732f74696d656f757415000000404427060b"
)
"""Written by TensorBoard 2.21: wall time 1000.5, step 300."""
FIGURES = {"reward_mean": 0.5, "loss": None, "why": "a text", "program": {"failures": {"timeout": 2}}}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard_events.time, "time", lambda: 1000.5)


def events_in(directory: Path) -> bytes:
    (path,) = directory.glob("events.out.tfevents.0000001000.*")
    return path.read_bytes()


def test_steps_are_written_as_tensorboard_writes_them(tmp_path: Path) -> None:
    events = TensorBoardEvents(tmp_path / "r0001")
    events.step(300, FIGURES)
    assert events_in(tmp_path / "r0001").hex() == VERSION + START + STEP
    events.step(300, FIGURES)
    assert events_in(tmp_path / "r0001").hex() == VERSION + START + STEP + STEP


def test_numbers_beyond_32_bits_and_nan_are_written(tmp_path: Path) -> None:
    TensorBoardEvents(tmp_path).step(1, {"large": 1e300, "small": -1e300, "none": math.nan})
    written = events_in(tmp_path)
    for tag, value in (("large", "0000807f"), ("small", "000080ff"), ("none", "0000c07f")):
        assert tag.encode() + b"\x15" + bytes.fromhex(value) in written


def test_metrics_write_them_beside_their_lines(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, tmp_path / "events")
    metrics.step(300, 500, FIGURES)
    assert events_in(tmp_path / "events").hex().endswith(STEP)
    assert json.loads(metrics.path.read_text())["program"] == {"failures": {"timeout": 2}}
    Metrics(tmp_path).step(301, 500, {})
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "events"}


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
