"""The benchmark of tool retrieval: its page shows the committed figures, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tool_retrieval import RESULTS, tables
from tests.factories.benchmark import result_of

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
FIGURES: dict[str, Any] = json.loads(RESULTS.read_text())


def test_the_page_shows_the_committed_figures() -> None:
    page = (FOLDER / "tool-retrieval.md").read_text()
    assert tables(FIGURES) in page
    for data_set in ("disjoint", "overlap"):
        assert f"{FIGURES[data_set]['pairs']:,} pairs" in page and f"{FIGURES[data_set]['seconds']:.0f} s" in page
        assert f"{FIGURES[data_set]['trained_tools']:,} of {FIGURES[data_set]['tools']:,} tools" in page


def test_what_the_page_concludes_is_what_was_measured() -> None:
    assert (FIGURES["disjoint"]["method"], FIGURES["overlap"]["method"]) == ("encoder", "bm25")
    assert FIGURES["overlap"]["results"]["unseen"]["methods"]["bm25"]["mrr"]["mean"] == 1
    search = FIGURES["search"]
    assert search["tools"] == 10_000
    assert all(each["median"] <= 5 for name, each in search.items() if name.endswith("_ms"))


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
def test_a_quick_run() -> None:
    found = result_of("tool_retrieval", "--quick")
    assert found.keys() == FIGURES.keys()
    assert found["search"].keys() == FIGURES["search"].keys()
    assert found["disjoint"].keys() == FIGURES["disjoint"].keys()
