"""The plan of the benchmark on the small model, its tables, and the page that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_model import RESULTS, SEEDS, Cell, cells, compared, gain, read, rows_of, table
from tests.factories.benchmark import result_of

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "real-model.md"


def figures(cell: Cell, exact: float, fields: float, *, adapter: bool = True) -> dict[str, Any]:
    shares = {"exact": {"mean": exact}, "fields": {"mean": fields}}
    training = {"adapter": adapter, "minutes": 2.0, "peak_gib": 5.0} if cell.stages else {}
    by_phrase = {"a": [exact - 0.1, fields], "b": [exact + 0.1, fields]}
    return {"judge_calls": cell.judge_calls, "sampled": shares, "training": training, "by_phrase": by_phrase}


def test_each_cell_comes_once_and_after_the_one_that_it_starts_from() -> None:
    planned = cells()
    names = [cell.name for cell in planned]
    assert len(set(names)) == len(names)
    for cell in planned:
        assert cell.parent is None or cell.parent in planned[: planned.index(cell)]
    stages = {cell.stages for cell in planned}
    assert stages == {(), ("sft",), ("grpo",), ("dpo",), ("sft", "grpo"), ("sft", "dpo")}
    # Equal judge calls: [sft] with as many judged replies as [sft, grpo] has replies and rollouts.
    both = next(cell for cell in planned if cell.stages == ("sft", "grpo"))
    assert any(cell.stages == ("sft",) and cell.judge_calls == both.judge_calls for cell in planned)


def test_rows_are_means_over_the_seeds_that_were_measured() -> None:
    measured = {SEEDS[0]: (0.2, 0.5), SEEDS[1]: (0.4, 0.7)}
    made = [(Cell(("sft",), 32, seed), values) for seed, values in measured.items()]
    [row] = rows_of({cell.name: figures(cell, *values) for cell, values in made})
    assert (row["stages"], row["replies"], row["seeds"], row["judge_calls"]) == ("sft", 32, 2, 32)
    assert row["exact"] == (pytest.approx(0.3), 0.2, 0.4) and row["fields"] == (pytest.approx(0.6), 0.5, 0.7)


def test_a_gain_is_of_the_same_seeds_and_phrases() -> None:
    results = {
        Cell(("sft",), 32, SEEDS[0]).name: figures(Cell(("sft",), 32, SEEDS[0]), 0.2, 0.5),
        Cell(("sft",), 32, SEEDS[1]).name: figures(Cell(("sft",), 32, SEEDS[1]), 0.9, 0.9),
        Cell(("sft", "grpo"), 32, SEEDS[0]).name: figures(Cell(("sft", "grpo"), 32, SEEDS[0]), 0.3, 0.7),
    }
    pairs = [(Cell(("sft", "grpo"), 32, seed), Cell(("sft",), 32, seed)) for seed in SEEDS]
    found = gain(results, pairs, 0)
    assert (found.mean, found.lower, found.upper) == pytest.approx((0.1, 0.1, 0.1))
    assert gain(results, [(Cell(("sft", "dpo"), 32, SEEDS[0]), pairs[0][1])], 0) is None


def test_stages_are_compared_on_equal_replies_and_with_equal_judge_calls() -> None:
    pairs = [(cell, over) for cell, over in compared(SEEDS[0]) if len(cell.stages) == 2]
    assert {(cell.replies, over.replies) for cell, over in pairs} == {(32, 32), (128, 128), (32, 672)}
    assert all(cell in cells() and over in cells() for cell, over in pairs)
    assert all(cell.replies == over.replies or cell.judge_calls == over.judge_calls for cell, over in pairs)


def test_a_stage_without_an_adapter_is_said() -> None:
    cell = Cell(("grpo",), 0, SEEDS[0])
    assert "`[grpo]` (no adapter: 1 of 1)" in table({cell.name: figures(cell, 0.0, 0.0, adapter=False)})


def test_the_page_shows_the_tables_of_the_committed_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for lines in table(read(RESULTS)).split("\n\n"):
        assert lines in text


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_run(small_model_path: Path, tmp_path: Path) -> None:
    arguments = ["--quick", "--dir", str(tmp_path), "--results", str(tmp_path / "results.json")]
    [made] = result_of("real_model", *arguments).values()
    assert made["training"]["adapter"] and made["training"]["steps"] == 3
    assert made["sampled"]["phrases"] == 48 and 0 <= made["sampled"]["fields"]["mean"] <= 1
    assert set(made["generation"]) == {"base", "adapter"}
