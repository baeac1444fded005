"""`flywheel round` and `run --once` with rounds that fail, and with those that were left unfinished."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def config(round_due: None, tmp_path: Path) -> Path:
    """Of a state in which a round is due."""
    path = tmp_path / "flywheel.yaml"
    path.write_text(
        "state: {dir: state}\nsources: []\n"
        "trigger: {min_samples: 4, min_held_out: 2, cron_min_samples: 1}\ngate: {min_tasks: 2}\n"
        "daemon: {round_attempts: 1, failed_round_wait_seconds: 600}\n"
    )
    return path


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs in the worker's place; it fails until it is told otherwise."""
    path = tmp_path / "worker"
    path.write_text("#!/bin/sh\necho out of memory\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def test_run_once_fails_with_its_round_and_tries_no_other(flywheel: Run, config: Path, worker: Path) -> None:
    config.write_text(config.read_text().replace("600", "0"))
    ran = flywheel("run", "--once", "-c", config)
    assert ran.code == 1
    assert "r0001 failed: cannot finish r0001: its worker died (out of memory)" in ran.err
    assert len(flywheel("status", "--json", "-c", config).json["rounds"]) == 1


def test_a_round_after_a_failed_one_says_what_it_waits_for(flywheel: Run, config: Path, worker: Path) -> None:
    assert flywheel("run", "--once", "-c", config).code == 1
    assert flywheel("run", "--once", "-c", config).code == 0, "nothing was due, so nothing failed"
    ran = flywheel("round", "-c", config)
    assert ran.code == 1
    assert "r0001 failed; the next try is at " in ran.err
    assert "traces" not in ran.err
    assert "--force" in ran.err


def test_a_round_that_was_left_unfinished_is_the_one_that_is_finished(
    flywheel: Run, config: Path, worker: Path
) -> None:
    worker.write_text(
        "#!/bin/sh\n"
        'echo \'{"round_id": "r0001", "outcome": "refused", "reason": "no spread"}\' > "$3/result.json"\n'
        "kill -TERM $PPID; exec sleep 600\n"
    )
    assert flywheel("round", "-c", config).code == 143
    worker.write_text(worker.read_text().partition("kill")[0])
    ran = flywheel("round", "-c", config, "--json")
    assert ran.code == 0
    assert (ran.json["round"], ran.json["state"], ran.json["attempt"]) == ("r0001", "rejected", 1)


def test_a_debug_round_whose_rollouts_are_all_undecided_is_shown(flywheel: Run, config: Path, worker: Path) -> None:
    worker.write_text(
        "#!/bin/sh\n"
        'echo \'{"event": "step", "reward_mean": null, "reward_std": null, "undecided": 8}\' > "$3/metrics.jsonl"\n'
        'echo \'{"event": "step", "reward_mean": 0.5, "reward_std": 0.25, "undecided": 1}\' >> "$3/metrics.jsonl"\n'
        'echo \'{"round_id": "debug", "outcome": "refused", "reason": "no spread"}\' > "$3/result.json"\n'
    )
    ran = flywheel("round", "--debug", "-c", config)
    assert ran.code == 0, ran.err
    assert "no reward, 8 undecided\nreward 0.500 ± 0.250, 1 undecided\n" in ran.out


@pytest.mark.parametrize("arguments", [("--force",), ("--debug",), ()])
def test_a_rubric_that_looks_at_tool_calls_starts_no_round(
    flywheel: Run, config: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "rubric.yaml").write_text(
        "version: 1\nid: mine\ncriteria:\n  - {id: order, type: tool-sequence, value: [search, read]}\n"
    )
    config.write_text(config.read_text() + "filter: {rubric: rubric.yaml}\n")
    ran = flywheel("round", *arguments, "-c", config)
    assert ran.code == 1
    assert "order (tool-sequence) of the rubric mine looks at tool calls" in ran.err
    assert "Take those criteria out of the rubric" in ran.err
    assert not (tmp_path / "state" / "rounds").exists()
