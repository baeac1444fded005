"""The trainer's benchmark on a GPU: a quick run on whatever this machine has, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import PLACE, RESULTS, read, table, tables, written_page
from flywheel.training.optim.stage_checks import WIDEST_GAP
from tests.factories.benchmark import result_of

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu.md"
CASE: dict[str, Any] = {
    "step_s": 1.5,
    "tokens": 65_536,
    "tokens_per_s": 43_691,
    "held_gib": 1.2,
    "peak_gib": 9.9,
    "base": "bfloat16",
    "adapter": "float32",
    "autocast": "bfloat16",
    "tensors": 392,
    "tensors_changed": 392,
    "logprob_gap": 0.0123,
}
FIGURES: dict[str, Any] = {
    "turn_random": {
        "rollout_tokens_per_s": 12_345,
        "update_tokens_per_s": 6_789,
        "logprob_gap": 0.0312,
        "peak_gib": 70.25,
        **dict.fromkeys(("startup_s", "sync_s", "gate_s", "round_s", "serve_s", "swap_s", "rollback_s"), 1.5),
    },
    "grpo": CASE,
    "grpo_8bit": {"failed": "RuntimeError: no kernel"},
    "logprobs": {"unquantised": {"from_float32": 0.004}, "8bit": {"from_float32": 0.02, "from_unquantised": 0.03}},
    "memory": {
        "limit_gib": None,
        "asked_tokens": 81_920,
        "repeated_tokens": [81_920, 40_960],
        "sufficed_tokens": 20_480,
        "gradient_difference": 0.0021,
        "gradient_difference_undisturbed": 0.002,
    },
    "machine": {"gpu": "one"},
}


def test_tables_have_the_figures_of_the_parts_that_succeeded() -> None:
    turns, cases, logprobs, memory = table(FIGURES).split("\n\n")
    assert turns.endswith("| Qwen3-0.6B, random weights | 12,345 | 6,789 | 0.0312 | 70.25 |" + " 1.5 |" * 7)
    assert cases.endswith("| GRPO | 1.50 | 43,691 | 1.2 | 9.9 | bfloat16 | bfloat16 | float32 | 392 of 392 |")
    assert "8bit" not in cases
    assert "| unquantised | 0.0040 |  | 0.0123 |" in logprobs and "| 8bit | 0.0200 | 0.0300 |  |" in logprobs
    assert "| passes that were repeated, tokens | 81,920, 40,960 |" in memory and "| 2.1e-03 |" in memory


def test_the_page_shows_the_tables_of_the_committed_figures() -> None:
    if found := read(RESULTS):
        assert not [name for name, each in found.items() if "failed" in each]
        for lines in table(found).split("\n\n"):
            assert lines in PAGE.read_text(encoding="utf-8")


def test_tables_are_written_into_their_places() -> None:
    page = PAGE.read_text(encoding="utf-8")
    once = written_page(page, FIGURES)
    for name, text in tables(FIGURES).items():
        assert f"{PLACE.format(name)}\n\n{text}\n\n" in once + "\n"
    assert written_page(once, FIGURES) == once
    assert written_page(page, read(RESULTS)) == page


@pytest.mark.gpu
@pytest.mark.training
@pytest.mark.timeout(1800)
def test_all_parts_on_a_gpu(tmp_path: Path) -> None:
    result = result_of("gpu", "--dir", str(tmp_path), "--results", str(tmp_path / "gpu.json"), seconds=1700)
    assert {"turn_random", *(("sft", "dpo", "grpo", "logprobs", "memory"))} <= result.keys()
    assert not [name for name, each in result.items() if "failed" in each]
    assert 0 < result["turn_random"]["logprob_gap"] < WIDEST_GAP
    assert result["turn_random"]["peak_gib"] > 0


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_quick_run(tmp_path: Path) -> None:
    """Each stage trains its adapter in float32, and a step that runs out of memory has the right gradient."""
    result = result_of("gpu", "--quick", "--dir", str(tmp_path), "--results", str(tmp_path / "gpu.json"))
    turn = result["turn_random"]
    # Engine and trainer agree on the policy's own tokens, and the server proved its weights.
    assert 0 <= turn["logprob_gap"] < 0.05
    assert min(turn[name] for name in ("rollout_tokens_per_s", "update_tokens_per_s", "swap_s", "rollback_s")) > 0
    for name in ("sft", "dpo", "grpo"):
        figures = result[name]
        assert (figures["adapter"], figures["loss_finite"]) == ("float32", True), name
        assert figures["tensors_changed"] == figures["tensors"] > 0
        assert figures["step_s"] > 0 and figures["tokens_per_s"] > 0
    # The engine's log-probabilities are those of the model that is trained, by another computation.
    assert 0 < result["logprobs"]["unquantised"]["from_float32"] < 0.1
    assert result["grpo"]["logprob_gap"] < 0.1
    small = result["small_model"]["unquantised"]
    assert small["nll_after"] < small["nll_before"], "SFT did not lower the loss on held-out replies"
    assert small["nll_served"] == pytest.approx(small["nll_after"], abs=0.05)
    memory = result["memory"]
    assert memory["repeated_tokens"][0] == memory["asked_tokens"] > memory["sufficed_tokens"]
    assert 0 < memory["gradient_difference"] < 0.05
    assert memory["gradient_difference"] < 3 * memory["gradient_difference_undisturbed"]
    written = read(tmp_path / "gpu.json")
    assert {**result, "machine": written["machine"]} == written
    assert table(written)


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
def test_single_parts_keep_the_figures_of_others(tmp_path: Path) -> None:
    """Those of a session that had more packages, too."""
    results = tmp_path / "gpu.json"
    kept = FIGURES | {"grpo_8bit": CASE, "machine": {"bitsandbytes": "0.50"}}
    results.write_text(json.dumps(kept))
    result = result_of("gpu", "--quick", "--only", "sft", "--dir", str(tmp_path), "--results", str(results))
    written = read(results)
    assert written["sft"] == result["sft"] and written["machine"].items() > kept["machine"].items()
    for name in ("grpo", "grpo_8bit", "logprobs", "memory"):
        assert written[name] == kept[name], name
