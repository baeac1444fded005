"""What the page says of a decision holds for every outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config.training import GateSettings
from flywheel.records.states import RoundState
from flywheel.store.deployments import BY_HAND, ROLLBACK
from flywheel.store.views import round_list
from flywheel.store.views.round_list import RoundFacts
from flywheel.web.gate_sentence import later, sentence
from tests.factories.round import (
    AT,
    GUARDED,
    KEEPING,
    comparison,
    criterion,
    put_deployment,
    put_tested_round,
    suite,
)
from tests.factories.state import read_state, write_state

SURE = "99.5 % interval"
CASES: dict[str, tuple[RoundState, dict[str, Any], str]] = {
    "promoted": (
        RoundState.PROMOTED,
        {"seen": comparison(), "parent": "r0000"},
        f"r0001 was promoted over r0000: better: gain +0.200, {SURE} +0.100 to +0.300; candidate 0.700, deployed"
        " 0.500, on 20 held-out tasks.",
    ),
    "promoted within margins": (
        RoundState.PROMOTED,
        {"seen": comparison(), "gate": GUARDED},
        "r0001 was promoted over the base model: better: gain +0.200",
    ),
    "rolled back before it was recorded": (
        RoundState.PROMOTED,
        {"seen": comparison(), "tail": "; rolled back since"},
        "held-out tasks; rolled back since.",
    ),
    "too few tasks": (
        RoundState.REJECTED,
        {"seen": comparison(tasks=7)},
        "r0001 was tested against the base model and rejected: not enough evidence: fewer than 8 held-out tasks"
        " decided (gain +0.200",
    ),
    "not enough evidence": (
        RoundState.REJECTED,
        {"seen": comparison(0.05)},
        f"not shown to be better: the lower bound is not above 0 (gain +0.050, {SURE} -0.050 to +0.150;",
    ),
    "no better": (RoundState.REJECTED, {"seen": comparison(-0.05)}, f"(gain -0.050, {SURE} -0.150 to +0.050;"),
    "worse": (RoundState.REJECTED, {"seen": comparison(-0.2)}, f"(gain -0.200, {SURE} -0.300 to -0.100;"),
    "better, by less than is needed": (
        RoundState.REJECTED,
        {"seen": comparison(), "gate": GateSettings(min_gain=0.1)},
        f"the lower bound is not above 0.1 (gain +0.200, {SURE} +0.100 to +0.300;",
    ),
    "vetoed by a margin": (
        RoundState.REJECTED,
        {"seen": comparison(criteria=[criterion("safe", -0.02)]), "gate": GUARDED},
        "r0001 was tested against the base model and rejected: not shown to be no worse in safe (-0.020, -0.060 to"
        " +0.020): the lower bound is not above -0.05 (gain +0.200",
    ),
    "vetoed, as little was seen of a criterion": (
        RoundState.REJECTED,
        {"seen": comparison(criteria=[criterion("safe", tasks=3)]), "gate": GUARDED},
        "rejected: not enough evidence on safe: it has verdicts on 3 held-out tasks, fewer than 8",
    ),
    "vetoed, as a criterion was never evaluated": (
        RoundState.REJECTED,
        {"seen": comparison(criteria=[]), "gate": GUARDED},
        "it has verdicts on 0 held-out tasks",
    ),
    "promoted with a suite": (
        RoundState.PROMOTED,
        {"seen": comparison(suites=[suite("math")]), "gate": KEEPING},
        "r0001 was promoted over the base model: better: gain +0.200",
    ),
    "vetoed by a suite": (
        RoundState.REJECTED,
        {"seen": comparison(suites=[suite("math", -0.2)]), "gate": KEEPING},
        "rejected: suite math lost: gain -0.200, -0.240 to -0.160: the lower bound is not above -0.05",
    ),
    "vetoed, as too little of a suite was decided": (
        RoundState.REJECTED,
        {"seen": comparison(suites=[suite("math", tasks=1)]), "gate": KEEPING},
        "rejected: not enough evidence on suite math: fewer than 8 tasks decided (1, 0 more undecided)",
    ),
    "vetoed, as a suite was never asked": (
        RoundState.REJECTED,
        {"seen": comparison(), "gate": KEEPING},
        "fewer than 8 tasks decided (0, 0 more undecided)",
    ),
    "vetoed by a tripwire": (
        RoundState.REJECTED,
        {"seen": comparison(tripwires=[criterion("cut", -0.2)])},
        "r0001 was tested against the base model and rejected: more answers are cut: not cut 0.800 before and 0.600"
        " now, gain -0.200, -0.240 to -0.160, all of it below -0.05",
    ),
    "refused": (
        RoundState.REJECTED,
        {"reason": "no group of its first steps has different rewards"},
        "r0001 was refused before its test: no group of its first steps has different rewards.",
    ),
    "failed before its test": (
        RoundState.FAILED,
        {"reason": "it ran longer than 60 s"},
        "r0001 failed before its test: it ran longer than 60 s.",
    ),
    "failed after its test": (
        RoundState.FAILED,
        {"seen": comparison(), "decided": False, "reason": "the files in /a have changed"},
        "r0001 failed after its test against the base model: the files in /a have changed.",
    ),
    "better, but another adapter serves": (
        RoundState.FAILED,
        {"seen": comparison(), "tail": "; but it was compared with r0000, and r0003 serves now"},
        "held-out tasks; but it was compared with r0000, and r0003 serves now.",
    ),
    "better, but not deployed": (
        RoundState.FAILED,
        {"seen": comparison(), "reason": "better ({reason}), but not deployed: cannot load it: no room."},
        "but not deployed: cannot load it: no room.",
    ),
    "better, but refused": (
        RoundState.REJECTED,
        {"seen": comparison(), "tail": "; but alice refused it"},
        "held-out tasks; but alice refused it.",
    ),
    "better, but nobody decided": (
        RoundState.REJECTED,
        {"seen": comparison(), "tail": "; but nobody deployed it within 7 days (deploy.approval_days)"},
        "held-out tasks; but nobody deployed it within 7 days (deploy.approval_days).",
    ),
    "waiting": (
        RoundState.PASSED,
        {"seen": comparison()},
        "r0001 passed its test against the base model and waits to be deployed: better: gain +0.200",
    ),
    "planned": (RoundState.PLANNED, {}, "r0001 has not begun."),
    "training": (RoundState.TRAINING, {}, "r0001 is in training and has not been compared yet."),
    "abandoned": (RoundState.ABANDONED, {}, "r0001 has lost its worker and has not been compared yet."),
    "evaluating": (
        RoundState.EVALUATING,
        {"seen": comparison(), "decided": False},
        "r0001 has been trained; the gate has not decided yet.",
    ),
    "being deployed": (
        RoundState.EVALUATING,
        {"seen": comparison()},
        "r0001 passed its test against the base model and is being deployed: better: gain +0.200",
    ),
}


def outcome_of(folder: Path) -> RoundFacts:
    found = read_state(folder, round_list.with_scores, "r0001")
    assert found is not None
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_decision_in_one_sentence(name: str, tmp_path: Path) -> None:
    state, values, expected = CASES[name]
    write_state(tmp_path, put_tested_round, number=1, state=state, directory=tmp_path, **values)
    found = outcome_of(tmp_path)
    said = sentence(found)
    assert expected in said
    assert said.endswith(".")
    assert not said.endswith("..")
    if found.comparison is not None:
        listed = read_state(tmp_path, round_list.listed, 5)
        assert sentence(listed[0]) == said, "the list needs no scores of tasks"
        assert not listed[0].comparison.scores


def test_what_followed_a_decision(tmp_path: Path) -> None:
    def after(state: RoundState, reason: str, until: str | None) -> str:
        values = {"retired_at": until} if until else {}
        write_state(tmp_path / state, put_deployment, adapter="r0001", reason=reason, **values)
        return later(outcome_of(tmp_path / state))

    rejected, promoted = RoundState.REJECTED, RoundState.PROMOTED
    for state, seen in ((rejected, comparison(0.0)), (promoted, comparison())):
        write_state(tmp_path / state, put_tested_round, number=1, state=state, directory=tmp_path, seen=seen)
    assert later(outcome_of(tmp_path / rejected)) == ""
    assert after(rejected, "by hand", AT) == (
        "It served as agent from 2026-11-22 10:00 (deployed by hand, although the gate had not promoted it) to"
        " 2026-11-22 10:00."
    )
    again = after(rejected, ROLLBACK, None)
    assert again.endswith("promoted it; last deployed by a rollback at 2026-11-22 10:00) and still does.")
    served = "It served as agent from 2026-11-22 10:00"
    assert after(promoted, "r0001: better", AT) == f"{served} to 2026-11-22 10:00."
    assert after(promoted, ROLLBACK, None) == (
        f"{served} (last deployed by a rollback at 2026-11-22 10:00) and still does."
    )
    again = after(promoted, BY_HAND, AT)
    assert "last deployed by hand" in again and "although" not in again
