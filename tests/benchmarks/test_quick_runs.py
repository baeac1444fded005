"""Each benchmark runs and prints its keys. How fast it was does not matter here."""

from __future__ import annotations

import pytest

from tests.factories.benchmark import result_of


@pytest.mark.long
def test_agents() -> None:
    """What it times is tested in `tests.training`."""
    result = result_of("agents", "--quick")
    times = {"endpoint_overhead_ms", "endpoint_overhead_ms_16", "direct_ms", "endpoint_ms", "merge_speedup"}
    assert result.keys() >= times
    # What merging saves, whatever the machine does meanwhile.
    assert result["by_turn_tokens"] > 3 * result["merged_tokens"]


@pytest.mark.slow
@pytest.mark.extended
def test_call_path() -> None:
    """A task passes through more code than a reply."""
    result = result_of("call_path")
    assert result.keys() == {"reply_functions", "reply_files", "task_functions", "task_files"}
    assert 0 < result["reply_files"] < result["reply_functions"] < result["task_functions"]
    assert result["reply_files"] < result["task_files"] < result["task_functions"]


@pytest.mark.slow
@pytest.mark.extended
def test_calls() -> None:
    result = result_of("calls", "--quick")
    assert result.keys() >= {"call_log_overhead_ms", "plain_overhead_ms", "stream_overhead_ms"}
    # No request without its record, and no record without its request.
    assert (result["recorded"], result["dropped"]) == (result["asked"], 0)
    assert result["mb_on_disk"] < result["mb_sent"] / 2
    # Of 158, 24 and 26 MB.
    assert all(0 < result[f"mb_{load}"] < 2 for load in ("long", "tools", "seeds"))


@pytest.mark.slow
def test_selection() -> None:
    result = result_of("selection", "--quick")
    assert result.keys() >= {"random_seconds", "diversity_seconds", "diversity_cpu_seconds"}
    # Of 500 questions, 450 are distinct.
    assert result["random_repeated"] == result["diversity_repeated"] == 0


@pytest.mark.slow
@pytest.mark.extended
def test_gate() -> None:
    """Its figures are what the program does, see `tests.training.gate`."""
    result = result_of("gate", "--quick")
    false = [result[f"false_promotion_20{kind}"] for kind in ("", "_clustered", "_growing")]
    assert all(share <= 0.2 for share in false), "of ten sequences"
    assert result["power_10_points"].keys() >= {"50", "200"}
    assert result["power_10_points"]["200"] >= 0.5
    assert max(result["tripwire_cost"].values()) <= 0.2, "of ten candidates"
    assert min(result["tripwires_block"].values()) >= 0.5


@pytest.mark.slow
@pytest.mark.extended
def test_idle() -> None:
    result = result_of("idle", "--quick")
    assert result.keys() >= {"rss_mb", "core_percent", "children", "seconds", "of_sources"}
    assert (result["sources"], result["spans"], result["children"]) == (2, 300, 0)
    assert result["threads"] > 0 and result["loop_tasks"] > 0
    assert result["rss_mb"] > 0 and result["core_percent"] >= 0
    assert result["judged"] >= 20


@pytest.mark.slow
def test_judge() -> None:
    result = result_of("judge", "--quick")
    assert result.keys() >= {"efficiency_16", "efficiency_256_1s", "overhead_vs_client", "reading_1mb_vs_100kb"}
    assert all(value > 0 for value in result.values())
    # Faster than the judge's latency allows would be a mistake of the measurement.
    assert max(result["efficiency_16"], result["efficiency_256_1s"]) < 1.5


@pytest.mark.long
@pytest.mark.training
def test_swap() -> None:
    result = result_of("swap", "--quick")
    assert (result["failed"], result["wrong_version"]) == (0, 0)
    assert result["asked"] > 0
    assert result.keys() >= {"p99_ratio", "p50_ratio", "p99_ms", "p99_swap_ms", "swap_seconds", "other_text"}
    assert result["overhead_ms"].keys() == {"1kB", "100kB", "5MB"}
    assert result["rollback_ms"].keys() == {"idle", "stopped", "loading"}


@pytest.mark.slow
@pytest.mark.long
def test_restart() -> None:
    result = result_of("restart", "--quick")
    assert result.keys() == {"restart_first_verdict_s", "rejudged_per_second", "tasks", "calls"}
    assert (result["tasks"], result["calls"]) == (2_000, 5)
    assert all(value > 0 for value in result.values())


@pytest.mark.slow
def test_watch() -> None:
    """Its figures are what the daemon's test does, see `tests.training.gate.test_sequential_test`."""
    result = result_of("watch", "--quick")
    assert result["false_rollback"] <= 0.3, "of ten watches"
    assert result["scenes"].keys() == {"rate 0.8"}
    assert result["delay"].keys() == {"0.9", "0.5", "0.1"}
    assert result["delay"]["0.5"]["rolled_back"] >= 0.7
    assert result["noticed"]["1000"]["loss"] < result["noticed"]["100"]["loss"]
