"""The page of the benchmark of swaps shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.swap import RESULTS, table

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "swap.md"


def test_the_page_has_the_figures() -> None:
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text(encoding="utf-8")
