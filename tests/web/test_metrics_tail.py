"""The measurements of rounds, read on while they grow, and after another attempt has begun."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from flywheel.training.data.metrics import Metrics
from flywheel.web import metrics_tail
from flywheel.web.metrics_tail import MetricsTails


def figures(**more: Any) -> dict[str, Any]:
    return {
        "reward_mean": 0.5, "reward_std": 0.1, "groups": 8, "groups_with_spread": 6,
        "seconds": {"generate": 2.0, "train": 1.0}, **more,
    }  # fmt: skip


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    metrics = Metrics(tmp_path)
    metrics.phase("starting")
    metrics.phase("training", prompts=67)
    metrics.step(1, 3, figures())
    return metrics


def test_figures_phases_and_parts(metrics: Metrics, tmp_path: Path) -> None:
    metrics.step(2, 3, figures(tools={"hit_rate": 0.9, "miss_share": None}, reward_std=float("nan")))
    found = MetricsTails().read(tmp_path)
    assert (found.steps.tolist(), found.planned) == ([1, 2], 3)
    assert [phase.name for phase in found.phases] == ["starting", "training"]
    assert found.last("spread_share") == 0.75
    assert found.last("seconds.generate") == 2.0
    assert (found.at("tools.hit_rate", 0), found.at("tools.hit_rate", 1)) == (None, 0.9)
    assert found.last("reward_std") is None
    assert found.last("tools.miss_share") is None
    assert found.last("no_such_figure") is None


def test_it_reads_on(metrics: Metrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tails = MetricsTails()
    first = tails.read(tmp_path)
    added: list[bytes] = []
    monkeypatch.setattr(metrics_tail.Curves, "add", lambda self, line: added.append(line))
    metrics.step(2, 3, figures())
    assert tails.read(tmp_path).file == first.file
    assert [orjson.loads(line)["step"] for line in added] == [2]


def test_an_unfinished_last_line_is_read_when_it_is_whole(metrics: Metrics, tmp_path: Path) -> None:
    tails = MetricsTails()
    line = orjson.dumps({"event": "step", "step": 2, "steps": 3, **figures(reward_mean=0.7)})
    with metrics.path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert tails.read(tmp_path).steps.tolist() == [1]
        file.write(line[20:] + b"\n")
    found = tails.read(tmp_path)
    assert found.steps.tolist() == [1, 2]
    assert found.last("reward_mean") == 0.7
    assert not found.unreadable


def test_another_attempt_replaces_the_figures(metrics: Metrics, tmp_path: Path) -> None:
    tails = MetricsTails()
    metrics.step(2, 3, figures())
    first = tails.read(tmp_path)
    # Removed and made anew, with more lines than the first attempt had.
    metrics.path.unlink()
    assert tails.read(tmp_path).steps.tolist() == []
    metrics.phase("starting")
    for step in range(1, 6):
        metrics.step(step, 5, figures(reward_mean=step / 10))
    found = tails.read(tmp_path)
    assert found.steps.tolist() == [1, 2, 3, 4, 5]
    assert found.last("reward_mean") == 0.5
    assert [phase.name for phase in found.phases] == ["starting"]
    assert found.file != first.file


def test_a_file_that_was_truncated_and_written_again(metrics: Metrics, tmp_path: Path) -> None:
    tails = MetricsTails()
    tails.read(tmp_path)
    size = metrics.path.stat().st_size
    with metrics.path.open("wb") as file:
        file.truncate()
    for step in range(1, 4):
        metrics.step(step, 3, figures(reward_mean=0.9))
    assert metrics.path.stat().st_size > size
    found = tails.read(tmp_path)
    assert found.figures["reward_mean"].tolist() == [0.9, 0.9, 0.9]
    assert found.phases == []


def test_a_step_that_is_written_again_replaces_what_follows(metrics: Metrics, tmp_path: Path) -> None:
    for step in (2, 3):
        metrics.step(step, 3, figures())
    metrics.step(2, 3, figures(reward_mean=0.9))
    found = MetricsTails().read(tmp_path)
    assert found.steps.tolist() == [1, 2]
    assert all(len(values) == 2 for values in found.figures.values())


def test_lines_that_are_no_measurements_are_counted(metrics: Metrics, tmp_path: Path) -> None:
    with metrics.path.open("ab") as file:
        file.write(b'not json\n[]\n{"event":"step"}\n{"event":"step","step":"x"}\n\n{"event":"later"}\n')
        file.write(b'{"event":"phase","phase":[],"at":1}\n')
        file.write(b'{"event":"step","step":99999999999999999999}\n{"event":"step","step":2,"reward_mean":"<b>"}\n')
        file.write(b'{"event":"step","step":3,"seconds":[1],"tools":"x","reward_mean":true}\n')
    found = MetricsTails().read(tmp_path)
    assert found.unreadable == 6
    assert found.steps.tolist() == [1, 2, 3]
    assert math.isnan(found.figures["reward_mean"][2])


def test_missing_files_and_directories(metrics: Metrics, tmp_path: Path) -> None:
    tails = MetricsTails()
    assert tails.read(tmp_path).steps.tolist() == [1]
    assert tails.read(tmp_path / "gone").steps.tolist() == []
    metrics.path.unlink()
    assert tails.read(tmp_path).file == ""
    assert tails.read(Path("/dev/null")).phases == []


def test_only_the_newest_rounds_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_tail, "KEPT_ROUNDS", 2)
    tails = MetricsTails()
    for name in "abc":
        (tmp_path / name).mkdir()
        Metrics(tmp_path / name).step(1, 1, figures())
        assert tails.read(tmp_path / name).steps.tolist() == [1]
    assert [path.name for path in tails._tails] == ["b", "c"]


def test_what_is_returned_stays_as_it_is(metrics: Metrics, tmp_path: Path) -> None:
    tails = MetricsTails()
    found = tails.read(tmp_path)
    metrics.step(2, 3, figures())
    assert tails.read(tmp_path).steps.tolist() == [1, 2]
    assert (found.steps.tolist(), len(found.figures["reward_mean"])) == ([1], 1)
