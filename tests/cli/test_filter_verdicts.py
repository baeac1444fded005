"""A changed rubric is judged by what is stored: only what the judge was never told is asked."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.cli.filter_bench import CRITERIA, Bench, changed
from tests.factories.state import execute

GOOD, BAD = "good: \\boxed{1}", "bad: \\boxed{0}"


def outcomes(ran: Any) -> dict[str, str]:
    return {verdict["task_id"]: verdict["outcome"] for verdict in ran["verdicts"]}


def states(bench: Bench) -> Counter[str]:
    return Counter(row[0] for row in change(bench, "SELECT state FROM tasks"))


def states_after(bench: Bench) -> Counter[str]:
    bench.filter()
    return states(bench)


def change(bench: Bench, sql: str, *values: Any) -> list[Any]:
    return execute(bench.folder / "state" / "state.db", sql, *values)


def test_a_new_threshold_needs_no_call_and_flips_verdicts(bench: Bench) -> None:
    bench.lines(GOOD, GOOD, BAD, "good, without a box")
    first = bench.filter()
    assert Counter(outcomes(first).values()) == {"accepted": 3, "rejected": 1}
    calls = bench.judge.calls
    # Without the box it is worth 0.8.
    bench.rubric(threshold=0.9)
    assert bench.filter()["judged"] == 0, "what is decided stays decided until somebody says otherwise"
    again = bench.filter("--rejudge")
    assert (again["judged"], again["reused"], again["changed"], again["usage"]["calls"]) == (4, 4, 1, 0)
    assert states(bench) == {"accepted": 2, "rejected": 2}
    assert bench.judge.calls == calls
    assert bench.filter("--rejudge")["judged"] == 0
    bench.rubric()
    back = bench.filter("--rejudge")
    assert (back["changed"], states(bench)) == (1, {"accepted": 3, "rejected": 1})
    assert bench.judge.calls == calls
    assert bench("audit", "--json").json["balanced"]


def test_a_weight_an_order_a_value_and_a_name_need_no_call(bench: Bench) -> None:
    bench.lines(GOOD, BAD, "good, without a box")
    bench.filter()
    calls = bench.judge.calls
    criteria = changed(boxed={"weight": 10}, clear={"id": "plain", "choices": {"no": 0.2, "yes": 0.9}})
    bench.rubric(criteria[::-1])
    again = bench.filter("--rejudge")
    assert (again["reused"], again["changed"], bench.judge.calls) == (3, 2, calls)
    scores = sorted(verdict["score"] for verdict in again["verdicts"])
    assert scores == pytest.approx([(3 + 0.9) / 14, (10 + 0.2) / 14, (10 + 3 + 0.9) / 14])
    bench.rubric(criteria[:2])
    assert bench.filter("--rejudge")["usage"]["calls"] == 0


def test_a_reworded_criterion_alone_is_asked_and_only_where_it_matters(bench: Bench) -> None:
    bench.lines(GOOD, BAD, "good, without a box")
    bench.filter()
    calls = bench.judge.calls
    bench.rubric(changed(boxed={"required": True}, clear={"value": "Every step is told."}))
    again = bench.filter("--rejudge")
    assert bench.asked(calls) == [["clear"], ["clear"]], "what lacks the box is rejected without a call"
    assert again["usage"]["calls"] == 2
    assert [verdict["outcome"] for verdict in again["verdicts"]] == ["accepted", "rejected", "rejected"]
    bench.rubric(threshold=0.1)
    assert bench.filter("--rejudge")["usage"]["calls"] == 0, "opinions on the old words are kept"


def test_other_choices_are_another_question(bench: Bench) -> None:
    bench.lines(GOOD)
    bench.filter()
    bench.rubric(changed(clear={"choices": ["no", "a little", "yes"]}))
    assert bench.filter("--rejudge")["usage"]["calls"] == 1
    bench.rubric(changed(clear={"choices": {"yes": 0, "no": 1}}))
    assert bench.filter("--rejudge")["usage"]["calls"] == 1, "the judge is told them worst to best"
    assert bench.asked(1) == [["clear"], ["clear"]]


def test_a_new_criterion_is_asked_by_itself_and_a_new_task_about_everything(bench: Bench) -> None:
    bench.lines(GOOD)
    bench.filter()
    bench.lines(BAD)
    calls = bench.judge.calls
    bench.rubric([*CRITERIA, {"id": "kind", "value": "It is kind."}])
    bench.filter("--rejudge")
    assert sorted(bench.asked(calls)) == [["correct", "clear", "kind"], ["kind"]]


def test_opinions_that_vote_are_recalled_one_by_one(bench: Bench) -> None:
    bench.lines(GOOD)
    bench.rubric(judge={"repeats": 2})
    bench.filter()
    assert bench.judge.calls == 2
    bench.rubric(judge={"repeats": 3})
    assert bench.filter("--rejudge")["usage"]["calls"] == 1
    bench.rubric(judge={"repeats": 3}, threshold=0.5)
    assert bench.filter("--rejudge")["usage"]["calls"] == 0
    bench.rubric(judge={"repeats": 1, "escalate": {"band": [0.9, 1.0], "repeats": 2}})
    assert bench.filter("--rejudge")["usage"]["calls"] == 2, "a second look is another one"
    bench.rubric(judge={"repeats": 1, "escalate": {"band": [0.9, 1.0], "repeats": 2}}, threshold=0.6)
    assert bench.filter("--rejudge")["usage"]["calls"] == 0


def test_another_judge_is_asked_about_everything(bench: Bench) -> None:
    bench.lines(GOOD, BAD)
    bench.filter()
    bench.settings["model"] = "another"
    assert bench.filter("--rejudge")["usage"]["calls"] == 2
    bench.settings["model"] = "judge"
    assert bench.filter("--rejudge")["usage"]["calls"] == 0
    assert bench.judge.calls == 4


def test_what_a_round_has_is_never_judged_again(bench: Bench) -> None:
    bench.lines(GOOD, GOOD, GOOD, GOOD)
    bench.filter()
    for number, state in ((1, "reserved"), (2, "consumed"), (3, "held")):
        change(bench, "UPDATE tasks SET state = ? WHERE id = ?", state, number)
    bench.rubric([{"id": "never", "type": "contains", "value": "no answer has this"}])
    again = bench.filter("--rejudge")
    assert (again["judged"], again["changed"]) == (1, 1)
    assert states(bench) == {"reserved": 1, "consumed": 1, "held": 1, "rejected": 1}


def test_an_undecided_second_verdict_leaves_the_first_standing(bench: Bench) -> None:
    bench.lines(GOOD, BAD)
    bench.filter()
    bench.rubric(changed(clear={"value": "Every step is told."}))
    bench.judge.behave("nonsense")
    again = bench.filter("--rejudge")
    assert (again["undecided"], again["changed"], again["usage"]["calls"] > 0) == (2, 0, True)
    assert states(bench) == {"accepted": 1, "rejected": 1}
    bench.judge.behave("good")
    assert bench.filter("--rejudge")["judged"] == 2


def as_it_was(stored: Any) -> Any:
    """What an older Flywheel would have written."""
    if isinstance(stored, list):
        return [as_it_was(each) for each in stored]
    if isinstance(stored, dict):
        return {key: as_it_was(each) for key, each in stored.items() if key not in ("hash", "estimated_tokens")}
    return stored


def test_verdicts_from_before_opinions_had_names_hold_for_their_own_rubric_alone(bench: Bench) -> None:
    bench.lines(GOOD)
    bench.filter()
    [columns] = change(bench, "SELECT results, judgements FROM verdicts")
    old = [json.dumps(as_it_was(json.loads(text))) for text in columns]
    change(bench, "UPDATE verdicts SET results = ?, judgements = ?", *old)
    change(bench, "UPDATE tasks SET state = 'pending'")
    assert bench.filter()["reused"] == 1
    bench.rubric(threshold=0.6)
    assert bench.filter("--rejudge")["usage"]["calls"] == 1


def test_what_a_filter_rejected_stays_rejected_and_what_repeats_is_not_let_in(bench: Bench) -> None:
    bench.chain = [
        {"type": "deduplication", "params": {}},
        {"type": "rules", "params": {"min_answer_length": 5}},
        {"type": "llm_evaluate"},
    ]
    bench.lines(GOOD, "no", "good, without a box")
    bench.filter()
    before = states(bench)
    bench.rubric(threshold=0.1)
    again = bench.filter("--rejudge")
    assert (again["judged"], again["usage"]["calls"]) == (2, 0)
    assert states(bench) == before


def test_a_pending_task_with_opinions_of_an_earlier_rubric_costs_nothing_either(bench: Bench) -> None:
    bench.lines(GOOD)
    bench.filter()
    change(bench, "UPDATE tasks SET state = 'pending'")
    bench.rubric(threshold=0.5)
    ran = bench.filter()
    assert (ran["judged"], ran["reused"], ran["usage"]["calls"]) == (1, 1, 0)


CHECKS = """import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))

def polite(task):
    import words
    said = (Path(__file__).parent / "said.txt").read_text()
    return words.WORD in task["answer"] + said, f"{words.WORD} is looked for"
"""


def checked_by_a_function(bench: Bench, **values: Any) -> None:
    (bench.folder / "checks.py").write_text(CHECKS)
    (bench.folder / "words.py").write_text("WORD = 'good'")
    (bench.folder / "said.txt").write_text("")
    bench.rubric(
        [{"id": "polite", "type": "python", "value": "checks.py:polite", "required": True, **values}, *CRITERIA]
    )


def test_a_changed_module_of_a_function_makes_another_rubric_and_no_call(bench: Bench) -> None:
    checked_by_a_function(bench)
    bench.lines(GOOD, "good and kind: \\boxed{1}")
    assert states_after(bench) == {"accepted": 2}
    calls = bench.judge.calls
    (bench.folder / "words.py").write_text("WORD = 'kind'")
    again = bench.filter("--rejudge")
    assert (again["judged"], again["changed"], bench.judge.calls) == (2, 1, calls)
    [missed] = [each for each in again["verdicts"] if each["outcome"] == "rejected"]
    assert "kind is looked for" in missed["reason"]
    assert not (bench.folder / "__pycache__").exists()


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_changed_file_of_a_function_is_seen_by_rejudge_and_no_judge_is_asked_anew(
    bench: Bench, is_listed: bool
) -> None:
    checked_by_a_function(bench, **({"files": ["said.txt"]} if is_listed else {}))
    bench.lines(GOOD, GOOD, "fine: \\boxed{1}")
    assert states_after(bench) == {"accepted": 2, "rejected": 1}
    calls, before = bench.judge.calls, change(bench, "SELECT id, judgements FROM verdicts ORDER BY id")
    unchanged = bench.filter("--rejudge")
    assert (unchanged["judged"], unchanged["reused"], unchanged["changed"]) == (3, 3, 0)
    assert change(bench, "SELECT id, judgements FROM verdicts ORDER BY id") == before
    (bench.folder / "said.txt").write_text("good")
    assert bench.filter()["judged"] == 0
    estimate = bench.filter("--rejudge", "--estimate")["estimate"]
    assert (estimate["tasks"], estimate["calls"], estimate["without_a_call"]) == (3, 1, 2), "it was never judged"
    again = bench.filter("--rejudge")
    assert (again["judged"], again["changed"], again["usage"]["calls"]) == (3, 0, 1)
    assert states(bench) == {"accepted": 2, "rejected": 1}, "the judge says no"
    assert bench.judge.calls == calls + 1
    (bench.folder / "said.txt").unlink()
    if not is_listed:
        undecided = bench.filter("--rejudge")
        assert (undecided["undecided"], undecided["changed"], states(bench)) == (3, 0, {"accepted": 2, "rejected": 1})
        (bench.folder / "said.txt").write_text("")
    else:
        ran = bench("filter", "--rejudge")
        assert (ran.code, "said.txt" in ran.err) == (78, True)
        (bench.folder / "said.txt").write_text("good")
    assert bench.filter("--rejudge")["usage"]["calls"] == 0
    assert bench("audit", "--json").json["balanced"]
