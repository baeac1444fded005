"""A candidate that waits for a person (`gate.mode: manual`), at a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flywheel.records.round import AdapterRef, RoundResult
from flywheel.store import requests
from flywheel.store.requests import RequestKind
from flywheel.system.files import tree_sha256
from tests.cli.conftest import Run
from tests.daemon.conftest import server
from tests.daemon.rounds.workers import works
from tests.factories.state import write_state
from tests.factories.wheel import comparison
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm

__all__ = ["server"]

MANUAL = ("--set", "gate.mode=manual")


@pytest.fixture
def config(
    due_config: Callable[..., Path],
    server: tuple[FakeVllm, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A round is due, whose worker leaves a better candidate."""
    app, url = server
    made, adapter = tmp_path / "made", tmp_path / "state" / "rounds" / "r0001" / "adapter"
    made.mkdir()
    (made / "weights").write_text("good")
    app.weights[str(adapter)] = PROBE.second.adapter
    result = RoundResult(
        round_id="r0001",
        outcome="trained",
        adapter=AdapterRef(name="r0001", path=str(adapter), sha256=tree_sha256(made)),
        comparison=comparison(0.5),
        probe=PROBE,
    )
    (tmp_path / "result.json").write_text(result.model_dump_json())
    works(tmp_path, monkeypatch, f"cp -r {made} $3/adapter; cp {tmp_path}/result.json $3/result.json")
    return due_config(model={"base": BASE, "alias": "agent"}, serving={"urls": [url], "drain_seconds": 0})


@pytest.mark.slow
def test_a_round_by_hand_says_for_whom_its_candidate_waits_and_a_person_deploys_it(
    flywheel: Run, config: Path
) -> None:
    ran = flywheel("round", *MANUAL, "-c", config)
    assert ran.code == 0, ran.err
    assert "\nr0001: passed: better: gain +0.700" in ran.out
    assert "it waits for a person: `flywheel deploy r0001`\n" in ran.out
    told = flywheel("status", *MANUAL, "-c", config)
    waits = r"^r0001 +passed, waits for a person: `flywheel deploy r0001` until \S+ \S+ UTC, held-out score"
    assert re.search(waits, told.out, re.M)
    [row] = flywheel("status", *MANUAL, "--json", "-c", config).json["rounds"]
    assert (row["state"], row["finished_at"], row["waits_for"]) == (
        "passed", None, "a person: `flywheel deploy r0001`",
    )  # fmt: skip
    assert row["waits_until"] > row["created_at"]

    assert flywheel("deploy", "r0001", "-c", config).out == "agent is now r0001\n"
    [row] = flywheel("status", *MANUAL, "--json", "-c", config).json["rounds"]
    assert row["state"] == "promoted" and "waits_for" not in row
    assert "r0001" in flywheel("why", "r0001").out
    assert flywheel("audit", "-c", config).code == 0


@pytest.mark.slow
def test_run_once_deploys_what_a_person_has_approved(flywheel: Run, config: Path, tmp_path: Path) -> None:
    assert flywheel("run", "--once", *MANUAL, "-c", config).code == 0
    status = flywheel("status", "--json", "-c", config).json
    assert status["rounds_by_state"]["passed"] == 1 and status["deployment"]["adapter"] is None
    arguments = {"round": "r0001", "max_uses": 3}
    write_state(tmp_path / "state", requests.submit, RequestKind.DEPLOY, arguments, "alice")
    assert flywheel("run", "--once", *MANUAL, "-c", config).code == 0
    status = flywheel("status", "--json", "-c", config).json
    assert status["rounds_by_state"]["promoted"] == 1 and status["deployment"]["adapter"] == "r0001"
