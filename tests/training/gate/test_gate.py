"""The gate decides from a comparison's figures alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.training import GateSettings
from flywheel.records.round import Comparison, CriterionComparison, DecisionReason, SuiteComparison
from flywheel.training.gate.gate import decide
from tests.factories.gate import comparison
from tests.factories.round import GATE


def test_a_gain_whose_interval_is_above_zero_is_promoted() -> None:
    decision = decide(comparison(), GATE)
    assert decision.promote
    assert decision.reason == (
        "better: gain +0.200, 95 % interval +0.100 to +0.300; candidate 0.700, deployed 0.500, on 50 held-out tasks"
    )


def test_misses_and_the_bound_with_the_deployed_adapters_at_one_are_reported_and_decide_nothing() -> None:
    missed = {"candidate_missed": 1, "deployed_missed": 12, "lower_at_bound": -0.034}
    decision = decide(comparison().model_copy(update=missed), GATE)
    assert decision.promote
    assert decision.reason.endswith(
        "on 50 held-out tasks; calls without a recorded result ended 1 answer of the candidate (scored 0) and 12 of"
        " the deployed (scored as its others' mean; the lower bound is -0.034 if they score 1)"
    )
    candidates = decide(comparison().model_copy(update={"candidate_missed": 2}), GATE).reason
    assert candidates.endswith("ended 2 answers of the candidate (scored 0) and 0 of the deployed")


def test_too_few_tasks_are_not_enough_evidence_however_large_the_gain() -> None:
    assert decide(comparison(tasks=8, gain=0.9, lower=0.9), GATE).promote
    decision = decide(comparison(tasks=7, gain=0.9, lower=0.9, undecided=5), GATE)
    assert not decision.promote
    assert decision.reason.startswith("not enough evidence: fewer than 8 held-out tasks decided")
    assert "5 more undecided" in decision.reason


def test_a_lower_bound_at_the_needed_gain_is_not_above_it() -> None:
    assert not decide(comparison(gain=0.1, lower=0.0), GATE).promote
    demanding = GateSettings(min_gain=0.1)
    assert not decide(comparison(gain=0.2, lower=0.1), demanding).promote
    assert decide(comparison(gain=0.2, lower=0.11), demanding).promote
    assert "is not above 0.1 (gain +0.200" in decide(comparison(gain=0.2, lower=0.05), demanding).reason


@given(
    tasks=st.integers(0, 30),
    lower=st.floats(-1, 1),
    gain=st.floats(-1, 1),
    min_tasks=st.integers(1, 30),
    min_gain=st.floats(0, 1),
)
def test_only_what_is_shown_is_promoted(
    tasks: int, lower: float, gain: float, min_tasks: int, min_gain: float
) -> None:
    gate = GateSettings(min_tasks=min_tasks, min_gain=min_gain)
    decision = decide(comparison(tasks=tasks, gain=max(lower, gain), lower=lower), gate)
    assert decision.promote == (tasks >= min_tasks and lower > min_gain)


@pytest.mark.slow
def test_the_gate_needs_no_science_library() -> None:
    code = (
        "import sys, flywheel.training.gate.gate\n"
        "print(sorted({'scipy', 'numpy', 'torch', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def criterion(name: str = "safe", *, gain: float = 0.0, lower: float = -0.04, tasks: int = 50) -> CriterionComparison:
    return CriterionComparison(
        criterion=name,
        tasks=tasks,
        candidate_mean=0.9 + gain,
        deployed_mean=0.9,
        gain=gain,
        lower=lower,
        upper=gain + (gain - lower),
    )


def with_criteria(*criteria: CriterionComparison, **values: float) -> Comparison:
    return comparison(**values).model_copy(update={"criteria": list(criteria)})  # type: ignore[arg-type]


GUARDED = GateSettings(non_inferiority_margins={"safe": 0.05})


def test_a_criterion_that_gets_worse_stops_what_is_better_as_a_whole() -> None:
    worse = with_criteria(criterion(gain=-0.1, lower=-0.16))
    assert decide(worse, GATE).promote, "without a margin the rubric's weights decide"
    decision = decide(worse, GUARDED)
    assert not decision.promote
    assert decision.reason.startswith(
        "not shown to be no worse in safe (-0.100, -0.160 to -0.040): the lower bound is not above -0.05 (gain +0.200"
    )


def test_a_criterion_that_is_no_worse_by_its_margin_stops_nothing() -> None:
    assert decide(with_criteria(criterion(lower=-0.049)), GUARDED).promote
    assert not decide(with_criteria(criterion(lower=-0.05)), GUARDED).promote


def test_a_criterion_of_which_too_little_was_seen_is_not_shown_to_be_no_worse() -> None:
    for seen, times in ((with_criteria(criterion(tasks=7)), "7 held-out tasks"), (comparison(), "0 held-out tasks")):
        decision = decide(seen, GUARDED)
        assert not decision.promote
        assert decision.reason.startswith(f"not enough evidence on safe: it has verdicts on {times}, fewer than 8")


def test_what_got_worse_is_told_whatever_is_decided() -> None:
    seen = with_criteria(criterion("clear", gain=-0.2, lower=-0.3), criterion("safe"))
    assert "; worse in clear (-0.200, -0.300 to -0.100)" in decide(seen, GATE).reason
    assert "worse" not in decide(with_criteria(criterion()), GATE).reason


def test_no_margin_makes_up_for_a_total_that_is_not_better() -> None:
    seen = with_criteria(criterion(lower=-0.01), lower=-0.1)
    assert decide(seen, GUARDED).reason.startswith("not shown to be better")


def suite(
    name: str = "math", *, gain: float = 0.0, lower: float = -0.04, tasks: int = 50, undecided: int = 0
) -> SuiteComparison:
    return SuiteComparison(
        name=name,
        tasks=tasks,
        conversations=tasks,
        undecided=undecided,
        candidate_mean=0.9 + gain,
        deployed_mean=0.9,
        gain=gain,
        lower=lower,
        upper=gain + (gain - lower),
    )


def on_suites(*suites: SuiteComparison, **values: float) -> Comparison:
    return comparison(**values).model_copy(update={"suites": list(suites)})  # type: ignore[arg-type]


def keeping(**margins: float | None) -> GateSettings:
    return GateSettings.model_validate(
        {"suites": {name: {"file": f"/{name}.jsonl", "margin": margin} for name, margin in margins.items()}}
    )


KEEPING = keeping(math=0.05, other=None)


def test_a_suite_that_is_forgotten_stops_what_is_better_on_the_held_out_tasks() -> None:
    lost = on_suites(suite(gain=-0.2, lower=-0.3))
    decision = decide(lost, KEEPING)
    assert not decision.promote
    assert decision.reason.startswith(
        "suite math lost: gain -0.200, -0.300 to -0.100: the lower bound is not above -0.05 (gain +0.200"
    )
    reported = decide(lost, keeping(math=None))
    assert reported.promote
    assert reported.reason.endswith("; worse in suite math (-0.200, -0.300 to -0.100)")
    assert decide(on_suites(suite(lower=-0.06)), KEEPING).reason.startswith("suite math may have lost: gain +0.000")


def test_a_suite_of_which_too_little_is_decided_is_not_shown_to_be_kept() -> None:
    few = decide(on_suites(suite(tasks=7, undecided=43)), KEEPING)
    assert few.reason.startswith(
        "not enough evidence on suite math: fewer than 8 tasks decided (7, 43 more undecided) (gain +0.200"
    )
    assert decide(on_suites(suite("other", tasks=0)), keeping(other=None)).promote


@given(
    lower=st.floats(-0.1, 1),
    of_suites=st.dictionaries(
        st.sampled_from("ab"),
        st.tuples(st.floats(-1, 1), st.sampled_from([8, 20, 7, None]), st.floats(0.01, 0.5) | st.none()),
    ),
)
def test_only_a_candidate_that_is_better_and_keeps_each_suite_with_a_margin_is_promoted(
    lower: float, of_suites: dict[str, tuple[float, int | None, float | None]]
) -> None:
    """A suite without a number of tasks is missing in the comparison."""
    gate = keeping(**{name: margin for name, (_, _, margin) in of_suites.items()})
    seen = on_suites(
        *(
            suite(name, lower=bound, tasks=tasks, gain=max(bound, 0.0))
            for name, (bound, tasks, _) in of_suites.items()
            if tasks is not None
        ),
        lower=lower,
    )
    kept = [
        tasks is not None and tasks >= gate.min_tasks and bound > -margin
        for bound, tasks, margin in of_suites.values()
        if margin is not None
    ]
    decision = decide(seen, gate)
    assert decision.promote == (lower > gate.min_gain and all(kept))
    without = decide(seen, GATE)
    assert without.promote == (lower > GATE.min_gain), "a suite that is not configured blocks nothing"
    if lower > gate.min_gain and not all(kept):
        assert decision.suite in of_suites
        assert decision.reason_code in (DecisionReason.FEW_ON_SUITE, DecisionReason.WORSE_ON_SUITE)


HARM = CriterionComparison(
    criterion="cut", tasks=50, candidate_mean=0.7, deployed_mean=0.9, gain=-0.2, lower=-0.3, upper=-0.1
)


def test_a_decision_names_its_ground_and_the_limits_that_it_applied() -> None:
    grounds = {
        DecisionReason.BETTER: (comparison(), GATE),
        DecisionReason.FEW_TASKS: (comparison(tasks=7), GATE),
        DecisionReason.NOT_BETTER: (comparison(lower=0.0), GATE),
        DecisionReason.FEW_ON_CRITERION: (comparison(), GUARDED),
        DecisionReason.WORSE_ON_CRITERION: (with_criteria(criterion(lower=-0.05)), GUARDED),
        DecisionReason.FEW_ON_SUITE: (comparison(), KEEPING),
        DecisionReason.WORSE_ON_SUITE: (on_suites(suite(lower=-0.05)), KEEPING),
        DecisionReason.HARMFUL: (comparison().model_copy(update={"tripwires": [HARM]}), GATE),
    }
    assert set(grounds) == set(DecisionReason)
    for reason_code, (seen, gate) in grounds.items():
        decision = decide(seen, gate)
        assert decision.reason_code is reason_code
        assert decision.criterion == ("safe" if "criterion" in reason_code else "")
        assert decision.tripwire == ("cut" if reason_code is DecisionReason.HARMFUL else "")
        assert decision.suite == ("math" if "suite" in reason_code else "")
        assert decision.suite_margins == ({"math": 0.05} if gate is KEEPING else {})
        limits = (decision.min_tasks, decision.min_gain, decision.confidence, decision.margins)
        assert limits == (gate.min_tasks, gate.min_gain, gate.confidence, gate.non_inferiority_margins)
