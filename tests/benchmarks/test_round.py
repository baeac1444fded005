"""The benchmark of a round: its work is the same in every run, and the page shows what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.round import RESULTS, alternate, check_lengths, processor_seconds, read, table
from benchmarks.round_work import GROUP, PROMPTS, RUBRIC, TRAIN, Judge, Work, endless, tasks
from flywheel.cli.demo import judge
from flywheel.config.judge import JudgeSettings
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.thread_pool import grade_all
from flywheel.records.verdict import Exchange
from tests.factories.benchmark import result_of
from tests.factories.round import POLICY
from tests.waiting import SOON

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "round.md"


def test_every_group_has_as_many_good_answers_as_bad_ones() -> None:
    """Equal answers, too: each is judged, so every run has the same number of calls."""
    scripted = Judge(0.0)
    with judge.running(complete=scripted) as url:
        grader = Grader(Rubric.model_validate(RUBRIC), JudgeSettings(base_url=url, model="judge", max_thread=4))
        asked = [
            Exchange(question, "7") for question in ("What is 3 plus 4?", "What is 1 plus 1?") for _ in range(GROUP)
        ]
        scores = {place: verdict.score for place, verdict in grade_all(grader, enumerate(asked), 4)}
        grader.close()
    assert scripted.calls == 2 * GROUP
    for start in (0, GROUP):
        assert sorted(scores[start + place] or 0.0 for place in range(GROUP)) == [0] * (GROUP // 2) + [1] * (
            GROUP // 2
        )


def test_calls_wait_for_the_judge_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that answered one call after the other would not have the floor that is reported."""
    together = threading.Barrier(4, timeout=SOON)
    monkeypatch.setattr("benchmarks.round_work.sleep", lambda _: together.wait())
    with judge.running(complete=Judge(0.5)) as url:
        grader = Grader(Rubric.model_validate(RUBRIC), JudgeSettings(base_url=url, model="judge", max_thread=4))
        asked = ((place, Exchange("What is 3 plus 4?", "7")) for place in range(4))
        assert all(verdict.score is not None for _, verdict in grade_all(grader, asked, 4))
        grader.close()


def test_questions_are_all_different() -> None:
    """The judge tells groups apart by their questions."""
    made = tasks("t-", 0, TRAIN)
    assert len({task.exchange.query for task in made}) == TRAIN >= PROMPTS


def test_a_copy_of_the_model_ends_answers_with_another_token(tmp_path: Path) -> None:
    own = json.loads((POLICY / "config.json").read_text())["eos_token_id"]
    copy = Path(endless(POLICY, tmp_path / "copy"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((copy / name).read_text())["eos_token_id"] != own
        assert json.loads((POLICY / name).read_text())["eos_token_id"] == own, "the model itself is unchanged"
    assert json.loads((copy / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert (copy / "model.safetensors").samefile(POLICY / "model.safetensors")


def test_answers_of_different_length_are_no_result() -> None:
    check_lengths({"trl": {"mean_tokens": 64.0}, "overlap_0": {"mean_tokens": 60.0}})
    with pytest.raises(SystemExit, match="not the same work"):
        check_lengths({"trl": {"mean_tokens": 64.0}, "overlap_0": {"mean_tokens": 57.0}})


def test_kinds_of_runs_alternate_and_figures_are_medians(tmp_path: Path) -> None:
    order: list[str] = []

    def run(kind: str, seconds: list[float], directory: Path) -> dict[str, Any]:
        assert directory.parent == tmp_path
        order.append(kind)
        return {"training_s": seconds.pop(0), "mean_tokens": 8.0}

    kinds = {"a": [1.0, 9.0, 2.0], "b": [3.0, 4.0, 5.0]}
    made = {kind: (lambda directory, kind=kind: run(kind, kinds[kind], directory)) for kind in ("a", "b")}
    assert {kind: each["training_s"] for kind, each in alternate(made, tmp_path, 3).items()} == {"a": 2, "b": 4}
    assert order == ["a", "b"] * 3


@pytest.mark.slow
def test_processor_seconds_are_of_all_processes_below() -> None:
    child = "import sys; print(sum(range(10**7)), flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        found = processor_seconds(process.pid)
        process.communicate()
    assert len(found) == 2
    # The parent may have taken less than a tick of the clock.
    assert max(found.values()) > 0


def test_tables_have_the_figures() -> None:
    columns = ("training", "sync", "generate", "grade", "gate", "cpu", "startup", "shutdown")
    figures: dict[str, Any] = {f"{name}_s": 1.0 + place for place, name in enumerate(columns)} | {"load": 0.1}
    kinds = {"overlap_0": figures, "overlap_1": figures | {"training_s": 20.0}, "floor": figures}
    ratios = {"floor_ratio": 0.9, "floor_ratio_overlap_0": 0.5, "judge_floor_s": 24.0, "compute_floor_s": 17.0}
    text = table({"round": {**ratios, "startup_s": 7.0, "shutdown_s": 1.5, "kinds": kinds}})
    assert "| `overlap: 1` | 20.0 | 2.0 | 3.0 | 4.0 | 5.0 |" in text
    assert "| judge calls × latency / slots | 24.0 s |" in text and "`overlap: 1` | 0.90 |" in text
    rows = [{"tokens": 8, "latency": 0.5, "kinds": kinds | {"trl": figures | {"training_s": 3.0, "startup_s": 9.0}}}]
    assert table({"trl": {"rows": rows}}).endswith("| 8 | 500 ms | 1.0 | 20.0 | 3.0 | 7.0 | 9.0 |")


def test_the_page_shows_the_tables_of_the_committed_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for lines in table(read(RESULTS)).split("\n\n"):
        assert lines in text


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.long
def test_a_quick_run() -> None:
    result = result_of("round", "--quick")
    assert result.keys() >= {"floor_ratio", "judge_floor_s", "compute_floor_s", "startup_s", "shutdown_s"}
    rollouts = Work("", 2, 0.05).rollouts
    assert result["judge_floor_s"] == rollouts * 0.05 / 16
    for kind in ("overlap_0", "overlap_1", "floor"):
        figures = result["kinds"][kind]
        assert (figures["rollouts"], figures["judge_calls"]) == (rollouts, rollouts)
        assert 0 < figures["compute_s"] < figures["training_s"]
        assert min(figures[f"{part}_s"] for part in ("startup", "shutdown", "gate", "cpu")) > 0


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.long
def test_a_quick_run_beside_trl(tmp_path: Path) -> None:
    result = result_of("round", "--quick", "--trl", "--results", str(tmp_path / "figures.json"))
    [row] = result["rows"]
    assert row["tokens"] == 8
    assert {kind: each["mean_tokens"] for kind, each in row["kinds"].items()} == dict.fromkeys(row["kinds"], 8)
    assert row["kinds"].keys() == {"overlap_0", "overlap_1", "trl"}
    assert "| 8 | 50 ms |" in table(read(tmp_path / "figures.json"))
