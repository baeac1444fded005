"""Trackers beside rounds: one that raises or hangs costs a warning, and the decision arrives from whoever made it."""

from __future__ import annotations

import json
import logging
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config, parse
from flywheel.config.training import TrackingSettings
from flywheel.daemon import file_round
from flywheel.daemon.file_round import spec_of, train_on_files
from flywheel.daemon.rounds import trackers
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.daemon.rounds.trackers import Trackers, decision_of
from flywheel.errors import ConfigError
from flywheel.records.round import RoundResult
from flywheel.records.states import RoundState
from flywheel.store import rounds
from tests.cli.conftest import Run
from tests.daemon.rounds.workers import works
from tests.factories.config import with_settings
from tests.factories.tracker import in_mlflow
from tests.factories.wheel import Wheel, comparison

FAKE = """
import sys, time

WRONG, PLACE = {wrong!r}, {place!r}

def at(place):
    if place == PLACE:
        if WRONG == "hangs":
            time.sleep(600)
        if WRONG == "exits":
            sys.exit("a reason")
        raise RuntimeError("a reason")

class Run:
    def log(self, figures, step=None):
        at("log")

    def finish(self):
        at("finish")

def init(**_):
    at("init")
    return Run()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a tracker with the interface of `trackio`."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[3]}")

    def write(wrong: str, place: str) -> None:
        (folder / "trackio.py").write_text(FAKE.format(wrong=wrong, place=place))

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        pytest.param(place, wrong, marks=() if place == own else pytest.mark.extended)
        for own, wrong in (("init", "raises"), ("log", "hangs"), ("finish", "exits"))
        for place in ("init", "log", "finish")
    ],
)
async def test_a_tracker_that_fails_costs_one_warning_and_no_step(
    tmp_path: Path,
    fake: Any,
    wrong: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake(wrong, place)
    monkeypatch.setattr(trackers, "END_SECONDS", 8 if wrong == "hangs" else 300)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+{n}?", "answer": str(2 * n)}) + "\n" for n in range(9)))
    python, result = sys.executable, RoundResult(round_id="tune", outcome="trained", steps=2).model_dump_json()
    steps = [
        {"event": "step", "step": step, "steps": 2, "loss": 1.0, "at": "2026-11-27T10:00:00+00:00"} for step in (1, 2)
    ]
    lines = "\n".join(map(json.dumps, steps))
    is_tracker = f'case "$*" in *flywheel.training.data.tracking*) exec {python} "$@";; esac'
    works(tmp_path, monkeypatch, f"{is_tracker}\necho '{lines}' > $3/metrics.jsonl\necho '{result}' > $3/result.json")
    settings = {"sources": [], "training": {"stages": ["sft"]}, "tracking": {"report_to": ["trackio"]}}
    config = parse(settings, "flywheel.yaml", tmp_path)
    with caplog.at_level(logging.WARNING):
        made = await train_on_files(spec_of(config, data, None, compares=False), tmp_path / "round", config)
    assert made.steps == 2
    assert len((tmp_path / "round" / "metrics.jsonl").read_text().splitlines()) == 2
    [warning] = [record.getMessage() for record in caplog.records if "trackio" in record.getMessage()]
    assert warning.startswith("tune was only partly sent to trackio: ")
    assert ("no answer for 8 s" if wrong == "hangs" else "a reason") in warning


async def test_a_package_that_is_missing_is_named_before_a_round(wheel: Wheel) -> None:
    config = with_settings(wheel.config, tracking={"report_to": ["swanlab", "console"]})
    words = rf"tracking.report_to needs swanlab, which {sys.executable} does not have.*pip install swanlab"
    with pytest.raises(ConfigError, match=words):
        wheel.others(config)


def test_commands_name_a_package_that_is_missing(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_round, "PACKAGES", ())
    (tmp_path / "one.yaml").write_text("tracking: {report_to: [swanlab]}")
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}))
    files = ("--base-model", "m", "--data", "data.jsonl", "--output", "out", "-c", "one.yaml")
    ran = flywheel("train", "sft", *files)
    assert (ran.code, "pip install swanlab" in ran.err) == (78, True)
    ran = flywheel("doctor", "-c", "one.yaml", "--json")
    [found] = [each for each in ran.json["checks"] if each["name"] == "trackers"]
    assert (found["result"], "pip install swanlab" in found["do"]) == ("failed", True)


def tracked(wheel: Wheel) -> Rounds:
    return wheel.others(with_settings(wheel.config, tracking={"report_to": ["mlflow"]}))


async def reported(wheel: Wheel, works_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """The rounds of a daemon that has run one; the worker is a script."""
    step = json.dumps({"event": "step", "step": 1, "steps": 1, "loss": 1.5, "at": "2026-11-27T10:00:00+00:00"})
    is_tracker = f'case "$*" in *flywheel.training.data.tracking*) exec {sys.executable} "$@";; esac'
    works(tmp_path, monkeypatch, f"{is_tracker}\necho '{step}' > $3/metrics.jsonl\n{works_as}")
    made = tracked(wheel)
    await made.plan("test")
    await made.finish_live()
    await made.close()
    return made


@pytest.mark.slow
async def test_the_daemons_decision_is_in_the_run(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = RoundResult(round_id="r0001", outcome="refused", reason="no spread").model_dump_json()
    await reported(wheel, f"echo '{refused}' > $3/result.json", tmp_path, monkeypatch)
    folder = wheel.config.state_dir / "tracking"
    ((_, run),) = in_mlflow(folder).items()
    assert run.steps == [(1, {"loss": 1.5})]
    assert (run.name, run.decision) == ("r0001", {"outcome": "rejected", "reason": "no spread"})

    # The next daemon sends it again only if this one may not have.
    log_of = folder / "r0001" / "mlflow.log"
    before = log_of.stat().st_mtime_ns
    await tracked(wheel).finish_live()
    assert log_of.stat().st_mtime_ns == before
    (folder / "r0001" / "decision.json").unlink()
    with closing(sqlite3.connect(folder / "mlflow.db")) as db, db:
        db.execute("DELETE FROM tags WHERE key LIKE 'gate.%'")
    position = folder / "r0001" / "mlflow.json"
    position.write_text(json.dumps({**json.loads(position.read_bytes()), "decision": {}}))
    again = tracked(wheel)
    await again.finish_live()
    await again.close()
    ((_, run),) = in_mlflow(folder).items()
    assert (run.steps, run.decision["outcome"]) == ([(1, {"loss": 1.5})], "rejected")


@pytest.mark.slow
async def test_a_failed_round_is_reported_with_its_reason(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reported(wheel, "exit 3", tmp_path, monkeypatch)
    ((_, run),) = in_mlflow(wheel.config.state_dir / "tracking").items()
    assert run.decision["outcome"] == RoundState.FAILED
    assert "exit code 3" in run.decision["reason"]


def test_a_decision_has_the_figures_of_its_comparison() -> None:
    result = RoundResult(round_id="r0001", outcome="trained", comparison=comparison(0.5)).model_dump(mode="json")
    figures = {
        "gain": 0.7,
        "lower": 0.5,
        "upper": 0.9,
        "candidate_mean": 0.9,
        "deployed_mean": 0.2,
        "conversations": 0,
    }
    assert decision_of("promoted", "better", result) == {"outcome": "promoted", "reason": "better", **figures}
    assert decision_of("failed", "why", None) == {"outcome": "failed", "reason": "why"}


async def test_a_round_that_was_not_sent_gets_no_decision(wheel: Wheel) -> None:
    made = tracked(wheel)
    await made.plan("test")
    row = await wheel.store.read(rounds.live)
    await wheel.store.write(rounds.finish, row.id, RoundState.PLANNED, RoundState.FAILED, "it was before")
    await made.finish_live()
    await made.close()
    assert not (wheel.config.state_dir / "tracking").exists()


async def test_without_trackers_no_process_is_started(tmp_path: Path) -> None:
    made = Trackers(tmp_path / "no-interpreter")
    made.begin(tmp_path, TrackingSettings(report_to=["console", "none"]).of_round("r0001", tmp_path))
    await made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_a_process_that_cannot_start_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracking = TrackingSettings(report_to=["mlflow"]).of_round("r0001", tmp_path)
    made = Trackers(tmp_path / "no-interpreter")
    made.begin(tmp_path, tracking)
    await made.close()
    assert "r0001 is not sent to mlflow: No such file or directory" in caplog.text


@pytest.mark.slow
async def test_two_processes_of_a_round_that_fail_are_one_warning_and_a_decision_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = TrackingSettings(report_to=["mlflow"]).of_round("r0001", tmp_path)
    started, start = [], subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)
    made = Trackers(Path(sys.executable))
    # Its directory has no specification, at which each process fails.
    made.begin(tmp_path / "r0001", tracking)
    await made.close()
    for outcome in ("rejected", "rejected", "promoted"):
        made.end(tmp_path / "r0001", tracking, {"outcome": outcome})
        await made.close()
    assert len(started) == 3
    warnings = [each.getMessage() for each in caplog.records if "only partly sent to mlflow" in each.getMessage()]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("tracking", "expected"),
    [
        ({}, "round/tracking/r0007"),
        ({"dir": "events"}, "events/r0007"),
        ({"report_to": ["wandb", "wandb", "none", "tensorboard"], "dir": "events"}, "events/r0007"),
    ],
)
def test_a_round_has_a_directory_of_its_own(tracking: dict[str, Any], expected: str, tmp_path: Path) -> None:
    found = parse({"tracking": tracking}, "flywheel.yaml", tmp_path).tracking.of_round("r0007", tmp_path / "round")
    assert found.dir == tmp_path / expected
    assert found.trackers == (["wandb", "tensorboard"] if "report_to" in tracking else [])


def test_another_tracker_is_an_error_that_lists_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"tracking": {"report_to": ["tensorbord"]}}, "flywheel.yaml", tmp_path)
    names = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio", "not `tensorbord`")
    assert all(name in caught.value.why for name in names)
    with pytest.raises(ConfigError, match=r"use tracking\.dir"):
        parse({"training": {"tensorboard": "events"}}, "flywheel.yaml", tmp_path)


def test_the_settings_are_those_of_the_whole_loop(tmp_path: Path) -> None:
    config = Config.model_validate({"sources": [], "targets": {"one": {}}, "tracking": {"project": "mine"}})
    assert {each.tracking.project for each in config.by_target().values()} == {"mine"}
