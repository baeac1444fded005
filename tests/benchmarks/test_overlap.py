"""The comparison of rounds with and without overlap, and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap import RESULTS, SEEDS, compared, table
from tests.factories.benchmark import result_of

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "round.md"


def rounds(*scores: float) -> dict[str, Any]:
    return {"rounds": [{"scores": {"a": score, "b": score + 0.2}, "train_seconds": 5.0} for score in scores]}


def test_differences_are_means_over_seeds() -> None:
    results = {
        "1": {"0": rounds(0.1, 0.5), "1": rounds(0.2, 0.5)},
        "2": {"0": rounds(0.3, 0.7), "1": rounds(0.6, 0.5)},
    }
    first, second = compared(results, 0), compared(results, 1)
    assert (first["seeds"], first["overlap_0"], first["overlap_1"]) == (2, pytest.approx(0.3), pytest.approx(0.5))
    assert first["difference"] == pytest.approx(0.2)
    assert first["interval"][0] < 0.2 < first["interval"][1]
    assert second["difference"] == pytest.approx(-0.1)


def test_the_page_shows_the_committed_figures() -> None:
    results = json.loads(RESULTS.read_text())
    assert tuple(map(int, results)) == SEEDS
    assert table(results) in PAGE.read_text()
    for figures in results.values():
        counts = [[each["rollouts"] for each in figures[overlap]["rounds"]] for overlap in "01"]
        assert counts[0] == counts[1], "equally many rollouts"


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_quick_run(tmp_path: Path) -> None:
    found: Any = result_of("overlap", "--quick", "--dir", str(tmp_path))
    assert [row["round"] for row in found] == [1, 2]
