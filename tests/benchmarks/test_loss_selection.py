"""The benchmark of SFT on replies that are chosen by their loss: a quick run, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loss_selection import RESULTS, SIZE, STRATEGIES, accepted, chosen, table
from tests.factories.benchmark import result_of

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "loss-selection.md"


def test_the_page_shows_the_table_of_the_committed_figures() -> None:
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text(encoding="utf-8")


def test_strategies_choose_from_one_pool() -> None:
    pool = accepted(128, 11)
    texts, losses = [message.text for message, _ in pool], [float(place) for place in range(128)]
    places = {strategy: chosen(strategy, texts, losses, SIZE, 11) for strategy in STRATEGIES}
    assert {len(set(each)) for each in places.values()} == {SIZE}
    # The two with the highest loss are set aside.
    assert set(places["loss_topk"]) == set(range(126 - SIZE, 126))
    assert len({tuple(sorted(each)) for each in places.values()}) == len(STRATEGIES)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
def test_a_quick_run() -> None:
    result = result_of("loss_selection", "--quick")
    assert set(result["11"]) == set(STRATEGIES)
    for each in result["11"].values():
        assert each["loss"] > 0 and len(each["by_phrase"]) == 4
