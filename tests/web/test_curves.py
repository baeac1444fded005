"""The figures of a round, read on while its file grows and after another attempt has begun, and their charts."""

from __future__ import annotations

import math
import re
from array import array
from math import nan
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from flywheel.config.file import Config
from flywheel.training.data.round_progress import Metrics
from flywheel.web import curves as curves_module
from flywheel.web.curves import MOST_POINTS, Curves, MetricsTails, charts_of, figures_by_step, sparkline
from flywheel.web.server import application


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
    monkeypatch.setattr(curves_module.Curves, "add", lambda self, line: added.append(line))
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
    monkeypatch.setattr(curves_module, "KEPT_ROUNDS", 2)
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


def curves(**values: list[float]) -> Curves:
    length = len(next(iter(values.values())))
    return Curves(
        file="f",
        steps=array("q", range(1, length + 1)),
        figures={name.replace("__", "."): array("d", numbers) for name, numbers in values.items()},
    )


def test_only_charts_with_figures_are_shown() -> None:
    found = curves(loss=[nan, 0.5], kl=[nan, nan], seconds__train=[1.0, nan])
    assert [chart.id for chart in charts_of(found)] == ["loss", "seconds"]
    assert charts_of(Curves()) == []


@pytest.mark.parametrize(
    ("rewards", "planned", "path"),
    [
        ([0.0, 1.0, 0.5], 0, "M0.0 100.0L150.0 0.0L300.0 50.0"),
        ([0.5, nan, 0.5], 0, "M0.0 50.0M300.0 50.0"),
        ([0.25], 0, "M0.0 75.0h0.1"),
        ([0.0, 1.0], 11, "M0.0 100.0L30.0 0.0"),
        ([nan, nan], 0, ""),
    ],
    ids=["a line", "a gap", "a point", "steps to come have their place", "no value"],
)
def test_a_sparkline(rewards: list[float], planned: int, path: str) -> None:
    found = curves(reward_mean=rewards)
    found.planned = planned
    assert sparkline(found) == path


def test_without_steps_or_rewards_there_is_no_sparkline() -> None:
    assert sparkline(Curves()) == sparkline(curves(loss=[0.5])) == ""


def test_a_long_line_is_thinned_and_ends_with_the_last_step() -> None:
    path = sparkline(curves(reward_mean=[step % 7 / 7 for step in range(5_000)]))
    assert path.count("L") <= MOST_POINTS + 1
    assert re.search(r"L300\.0 [\d.]+$", path)


def test_figures_for_the_script_are_numbers_or_null() -> None:
    found = figures_by_step("r0001", curves(loss=[0.1, nan, 0.3], rollouts=[64.0, 64.0, 64.0]), 1)
    assert found == {"round": "r0001", "file": "f", "begin": 1, "steps": [2, 3], "figures": {"loss": [None, 0.3]}}


async def test_the_pages_without_a_browser(shared_state: Config) -> None:
    transport = httpx2.ASGITransport(application(shared_state))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asked:
        listed = (await asked.get("/rounds")).text
        assert listed.index('id="row-r0003"') < listed.index('id="row-r0001"')
        shown = (await asked.get("/rounds/r0001?with=r0002&steps=all")).text
        assert "r0001 was promoted" in shown
        assert shown.count('class="chart card"') == 10
        found = (await asked.get("/rounds/r0001/curves")).json()
        assert (found["begin"], found["steps"][-1], found["figures"]["reward_mean"][-1]) == (0, 12, 0.5)
