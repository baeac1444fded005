"""The figures of a round, while its file grows and after another attempt has begun; charts, axes and dots."""

from __future__ import annotations

import html
import json
import math
import re
from math import nan
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.file import Config
from flywheel.records.round import Score
from flywheel.training.data.round_progress import Metrics
from flywheel.web.curves import MOST_POINTS, Curves, charts_of, curves_in, figures_by_step, sparkline
from flywheel.web.plots import (
    AXIS_MARGIN,
    AXIS_WIDTH,
    DOTS_HEIGHT,
    DOTS_TOP,
    axis_of,
    dots_width,
    paired_dots,
    ranked,
)
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
    found = curves_in(tmp_path)
    assert (found.steps, found.planned) == ([1, 2], 3)
    assert [name for name, _ in found.phases] == ["starting", "training"]
    assert found.last("spread_share") == 0.75
    assert found.last("seconds.generate") == 2.0
    assert (found.at("tools.hit_rate", 0), found.at("tools.hit_rate", 1)) == (None, 0.9)
    assert found.last("reward_std") is None
    assert found.last("tools.miss_share") is None
    assert found.last("no_such_figure") is None


def test_an_unfinished_last_line_is_read_when_it_is_whole(metrics: Metrics, tmp_path: Path) -> None:
    line = orjson.dumps({"event": "step", "step": 2, "steps": 3, **figures(reward_mean=0.7)})
    with metrics.path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert (curves_in(tmp_path).steps, curves_in(tmp_path).unreadable) == ([1], 0), "the last line is unfinished"
        file.write(line[20:] + b"\n")
    found = curves_in(tmp_path)
    assert (found.steps, found.last("reward_mean"), found.unreadable) == ([1, 2], 0.7, 0)
    # A step that is written again replaces what follows.
    metrics.step(3, 3, figures())
    metrics.step(2, 3, figures(reward_mean=0.9))
    found = curves_in(tmp_path)
    assert (found.steps, {len(values) for values in found.figures.values()}) == ([1, 2], {2})
    # Another attempt empties the file, and writes more than the first one had.
    with metrics.path.open("wb") as file:
        file.truncate()
    for step in range(1, 6):
        metrics.step(step, 5, figures(reward_mean=step / 10))
    found = curves_in(tmp_path)
    assert (found.steps, found.last("reward_mean"), found.phases) == ([1, 2, 3, 4, 5], 0.5, [])


def test_lines_that_are_no_measurements_are_counted(metrics: Metrics, tmp_path: Path) -> None:
    with metrics.path.open("ab") as file:
        file.write(b'not json\n[]\n{"event":"step"}\n{"event":"step","step":"x"}\n\n{"event":"later"}\n')
        file.write(b'{"event":"phase","phase":[],"at":1}\n')
        file.write(b'{"event":"step","step":99999999999999999999}\n{"event":"step","step":2,"reward_mean":"<b>"}\n')
        file.write(b'{"event":"step","step":3,"seconds":[1],"tools":"x","reward_mean":true}\n')
    found = curves_in(tmp_path)
    assert found.unreadable == 6
    assert found.steps == [1, 2, 3]
    assert math.isnan(found.figures["reward_mean"][2])


def test_missing_files_and_directories(metrics: Metrics, tmp_path: Path) -> None:
    assert curves_in(tmp_path).steps == [1]
    assert curves_in(tmp_path / "gone").steps == []
    metrics.path.unlink()
    assert curves_in(tmp_path) == Curves()
    assert curves_in(Path("/dev/null")).phases == []


def curves(**values: list[float]) -> Curves:
    length = len(next(iter(values.values())))
    return Curves(
        steps=list(range(1, length + 1)),
        figures={name.replace("__", "."): numbers for name, numbers in values.items()},
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


def test_a_long_line_is_thinned_and_ends_with_the_last_step() -> None:
    path = sparkline(curves(reward_mean=[step % 7 / 7 for step in range(5_000)]))
    assert path.count("L") <= MOST_POINTS + 1
    assert re.search(r"L300\.0 [\d.]+$", path)
    assert sparkline(Curves()) == sparkline(curves(loss=[0.5])) == "", "without steps or rewards there is none"


def test_figures_for_the_script_are_numbers_or_null() -> None:
    found = figures_by_step(curves(loss=[0.1, nan, 0.3], rollouts=[64.0, 64.0, 64.0]))
    assert found == {"steps": [1, 2, 3], "figures": {"loss": [0.1, None, 0.3]}}


async def test_the_pages_without_a_browser(shared_state: Config) -> None:
    transport = httpx2.ASGITransport(application(shared_state))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asked:
        listed = (await asked.get("/rounds")).text
        assert listed.index('id="row-r0003"') < listed.index('id="row-r0001"')
        shown = (await asked.get("/rounds/r0001?with=r0002&steps=all")).text
        assert "r0001 was promoted" in shown
        assert shown.count('class="chart card"') == 10
        found = json.loads(html.unescape(re.findall(r'data-curves="([^"]+)"', shown)[0]))
        assert list(found) == ["r0001", "r0002"]
        assert (found["r0001"]["steps"][-1], found["r0001"]["figures"]["reward_mean"][-1]) == (12, 0.5)


@given(st.lists(st.floats(-1, 1), max_size=8))
def test_an_axis_has_all_values_and_zero_and_a_few_ticks(values: list[float]) -> None:
    axis = axis_of(values)
    assert axis.low <= min(values, default=0) + 1e-6
    assert axis.high >= max(values, default=0) - 1e-6
    assert 0 in axis.ticks
    assert 2 <= len(axis.ticks) <= 6
    assert (axis.at(axis.low), axis.at(axis.high)) == (AXIS_MARGIN, AXIS_WIDTH - AXIS_MARGIN)
    assert all(AXIS_MARGIN <= axis.at(value) <= AXIS_WIDTH - AXIS_MARGIN for value in values)


def test_ticks_are_round_numbers() -> None:
    assert axis_of([-0.116, 0.519]).ticks == [-0.2, 0.0, 0.2, 0.4, 0.6]
    assert axis_of([]).ticks == [-0.1, -0.05, 0.0, 0.05, 0.1]


def test_paired_dots_begin_with_the_largest_loss() -> None:
    scores = [
        Score(task_id="same", candidate=0.5, deployed=0.5),
        Score(task_id="gain", candidate=1.0, deployed=0.0),
        Score(task_id="loss", candidate=0.25, deployed=0.5),
    ]
    dots = paired_dots(ranked(scores))
    expected = [("loss", "loss"), ("same", "same"), ("gain", "gain")]
    assert [(each.score.task_id, each.kind) for each in dots] == expected
    assert (dots[2].candidate, dots[2].deployed) == (DOTS_TOP, DOTS_TOP + DOTS_HEIGHT)
    assert all(0 < each.x < dots_width(3) for each in dots)
    assert not paired_dots([])
