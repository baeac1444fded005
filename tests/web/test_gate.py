"""The Gate page: the list of decisions, one decision with its evidence, and the answers about one task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.daemon.rounds.gate_planning import NextTest
from flywheel.records.round import GateTest
from flywheel.records.states import RoundState
from flywheel.store.views import round_list
from flywheel.web.gate import of_live, of_next
from tests.factories.round import (
    GUARDED,
    KEEPING,
    comparison,
    criterion,
    put_answers,
    put_deployment,
    put_tested_round,
    suite,
)
from tests.factories.state import read_state, write_state
from tests.factories.web import client
from tests.web.recorded_state import HOSTILE, config_of, put_held_out


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Config, list[str]]:
    """Three rounds: promoted, vetoed and then deployed by hand, refused."""
    directory = tmp_path / "rounds"

    def put(conn: Connection) -> list[str]:
        keys = put_held_out(conn)
        put_tested_round(conn, 1, RoundState.PROMOTED, directory, comparison(keys=keys))
        vetoed = comparison(keys=keys, criteria=[criterion("safe", -0.02), criterion("correct", 0.1)])
        put_tested_round(conn, 2, RoundState.REJECTED, directory, vetoed, gate=GUARDED, parent="r0001")
        refused = "no group of its first steps has different rewards"
        put_tested_round(conn, 3, RoundState.REJECTED, directory, None, reason=refused)
        put_deployment(conn, adapter="r0002", reason="by hand")
        return keys

    config, keys = config_of(tmp_path), write_state(tmp_path / "state", put)
    put_answers(directory / "r0002", keys, text="{side} says {key} " + HOSTILE.replace("{", "{{").replace("}", "}}"))
    return config, keys


def test_the_list_says_of_each_round_what_was_decided(filled: tuple[Config, list[str]]) -> None:
    page = client(filled[0]).get("/gate").text
    assert page.index("r0003 was refused before its test") < page.index("r0002 was tested against r0001 and rejected")
    assert page.index("although the gate had not promoted it") < page.index("r0001 was promoted")
    assert "level 0.0006, spent on 8 conversations" in page
    assert "level 0.00027, not spent" in page
    assert "No round starts now, because its test would detect too little" in page


def test_a_part_of_the_list(filled: tuple[Config, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.web.gate.PER_PAGE", 2)
    http = client(filled[0])
    first = http.get("/gate").text
    assert 'href="/gate?before=2"' in first
    assert "r0001 was" not in first
    assert "r0001 was promoted" in http.get("/gate?before=2").text
    assert "There is no older round" in http.get("/gate?before=1").text
    assert http.get("/gate?before=x").status_code == 400


def test_a_decision_with_its_evidence(filled: tuple[Config, list[str]]) -> None:
    page = client(filled[0]).get("/gate/r0002").text
    assert "not shown to be no worse in safe (-0.020, -0.060 to +0.020): the lower bound is not above -0.05" in page
    assert "not above -0.05" in page
    assert "safe loses less than 0.05" in page
    assert page.count('<circle class="candidate"') == 8
    assert page.count('class="pair-of"') == 6
    gains, losses = page.split("Largest losses")
    assert "0.50 → 1.00" in gains.partition("Largest gains")[2]
    assert "0.50 → 0.25" in losses
    assert "deployed · score 0.00" in gains, "the pair of the seed at which the candidate was better"
    assert "deployed · score 1.00" in losses


def test_suites_are_rows_beside_the_criteria(tmp_path: Path) -> None:
    forgot = comparison(suites=[suite("math", -0.2), suite("tone", -0.2)])
    write_state(tmp_path / "state", put_tested_round, 1, RoundState.REJECTED, tmp_path, forgot, gate=KEEPING)
    page = client(config_of(tmp_path)).get("/gate/r0001").text
    rows = {name: page.partition(f"Suite {name}")[2].partition("</tr>")[0] for name in ("math", "tone")}
    assert "not above -0.05" in rows["math"]
    assert "-0.200" in rows["math"]
    assert "worse" in rows["tone"]
    assert "suite math loses less than 0.05" in page
    assert "95 % for each criterion and suite" in page


def test_the_answers_of_both_sides_about_a_task(filled: tuple[Config, list[str]]) -> None:
    config, keys = filled
    http = client(config)
    page = http.get(f"/gate/r0002/{keys[0]}").text
    assert page.count("candidate says") == 2
    assert page.count("deployed says") == 2
    assert "Score 0.50 → 0.25" in page
    assert http.get("/gate/r0002/t-none").status_code == 404
    assert http.get("/gate/r0009/t-none").status_code == 404


def test_rounds_without_answers_or_without_a_comparison(filled: tuple[Config, list[str]]) -> None:
    http = client(filled[0])
    page = http.get("/gate/r0001").text
    assert "retention has removed them" in page
    assert page.count('<circle class="candidate"') == 8, "the evidence stays"
    page = http.get("/gate/r0003").text
    assert "no group of its first steps has different rewards" in page
    assert "Evidence" not in page
    assert http.get("/gate/r0009").status_code == 404


def test_the_next_test(tmp_path: Path) -> None:
    coming = NextTest(GateTest(epoch=2, number=3, alpha=0.00027), [], 1200, 0.831, 0, "")
    assert of_next(coming) == (
        "The next round takes test 3 of epoch 2, whose one-sided level is 0.00027. With 1,200 held-out conversations,"
        " it would detect a gain of 10 points 83% of the time."
    )
    assert of_next(replace(coming, shortfall="3 of 15 held-out conversations: so")) == (
        "No round starts now, because its test would detect too little: 3 of 15 held-out conversations: so."
    )
    write_state(tmp_path / "state", put_tested_round, 1, RoundState.TRAINING, tmp_path)
    live = read_state(tmp_path / "state", round_list.with_scores, "r0001")
    assert live is not None
    assert of_live(live) == "r0001 takes test 1 of epoch 1, whose one-sided level is 0.0024."
