"""The lines of charts where no script draws them, the phases of a round, and its pages without a browser."""

from __future__ import annotations

import re
from array import array
from math import nan

import httpx2

from flywheel.config import Config
from flywheel.web.curves import CHARTS, HEIGHT, MOST_POINTS, WIDTH, Chart, charts_of, figures_by_step, picture
from flywheel.web.metrics_tail import Curves
from flywheel.web.server import application

LOSS = Chart("loss", "Loss", "", (("loss", "loss"),), "")


def curves(**figures: list[float]) -> Curves:
    length = len(next(iter(figures.values())))
    return Curves(
        file="f",
        steps=array("q", range(1, length + 1)),
        figures={name.replace("__", "."): array("d", values) for name, values in figures.items()},
    )


def path_of(chart: Chart, found: Curves) -> str:
    drawn = picture(chart, found)
    assert drawn is not None
    return drawn.lines[0][1]


def test_only_charts_with_figures_are_shown() -> None:
    found = curves(loss=[nan, 0.5], kl=[nan, nan], seconds__train=[1.0, nan])
    assert [chart.id for chart in charts_of(found)] == ["loss", "seconds"]
    assert picture(CHARTS[0], found) is None
    assert charts_of(Curves()) == []


def test_a_line_fills_its_box() -> None:
    assert path_of(LOSS, curves(loss=[-1.0, 1.0, 0.0])) == f"M0.0 {HEIGHT:.1f}L150.0 0.0L{WIDTH:.1f} 50.0"
    # An axis with ends of its own.
    reward = Chart("reward", "Reward", "", (("reward_mean", "mean"),), "", low=0, high=1)
    assert path_of(reward, curves(reward_mean=[0.25, 0.5])) == "M0.0 75.0L300.0 50.0"


def test_a_line_has_gaps_and_may_be_a_point_or_constant() -> None:
    assert path_of(LOSS, curves(loss=[1.0, nan, 1.0])) == "M0.0 50.0M300.0 50.0"
    assert path_of(LOSS, curves(loss=[2.0])) == "M0.0 50.0h0.1"


def test_steps_to_come_have_their_place() -> None:
    found = curves(loss=[0.0, 1.0])
    found.planned = 11
    assert path_of(LOSS, found) == "M0.0 100.0L30.0 0.0"


def test_a_long_line_is_thinned_and_ends_with_the_last_step() -> None:
    path = path_of(LOSS, curves(loss=[float(step % 7) for step in range(5_000)]))
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
