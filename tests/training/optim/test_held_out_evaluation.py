"""Held-out tasks are asked as the agent's server answers them, and not as a round learns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.judge.usage import Purpose
from flywheel.records.round import Comparison, GateTest, RoundSpec, Suite
from flywheel.records.verdict import CriterionResult, Exchange, Verdict
from flywheel.training.data.prompts import seed_of
from flywheel.training.data.rollout import Completion, LoadedAdapter, Rollout, RolloutBatch, RolloutRequest
from flywheel.training.data.rollout_file import read_answers
from flywheel.training.optim.collector import Collector, Grade
from flywheel.training.optim.held_out_evaluation import GateComparison, HeldOutAnswers, answer
from flywheel.training.worker.round import Round
from tests.factories.round import round_spec
from tests.training.data.rollouts import missed, prompt, rollout, verdict

CANDIDATE = LoadedAdapter("r0001", 1)
SEEDS = [seed_of(7, "held-out", "t-1", sample) for sample in range(2)]


def right(request: RolloutRequest) -> Rollout:
    done = rollout(0, 1.0)
    return Rollout(request, done.completion, done.verdict)


class Answers:
    """Takes the place of engines and judge, which gives the same verdicts again. `made` is an answer of a request at
    a place; where it is None, the answer is right."""

    def __init__(self, made: Callable[[RolloutRequest, int], Rollout | None] = lambda *_: None) -> None:
        self._made = made
        self.requests: list[RolloutRequest] = []

    def collect(
        self, requests: Sequence[RolloutRequest], *, most_open: int, on_rollout: Callable[[Rollout], None]
    ) -> RolloutBatch:
        self.requests += requests
        found = tuple(self._made(each, place) or right(each) for place, each in enumerate(requests))
        for each in found:
            on_rollout(each)
        return RolloutBatch(found)

    def grade_again(self, batch: RolloutBatch, on_rollout: Callable[[Rollout], None]) -> RolloutBatch:
        return batch


def missing(other: float | None = 1.0) -> Answers:
    """The candidate's first answer of t-1 ends by a miss, and so does the deployed adapter's second one; the other
    answers score `other` and 0.5."""

    def made(request: RolloutRequest, _: int) -> Rollout:
        of_candidate = request.adapter == CANDIDATE
        if request.seed == SEEDS[0 if of_candidate else 1]:
            return Rollout(request, missed(0).completion, None)
        done = rollout(0, other if of_candidate else 0.5)
        assert done.verdict is not None
        results = (CriterionResult("right", "yes", 1.0, True),)
        return Rollout(request, done.completion, replace(done.verdict, results=results))

    return Answers(made)


def undecided(request: RolloutRequest, place: int) -> Rollout | None:
    """The candidate's answers to t-1: one with the result of a check, one that no engine made."""
    checked = replace(verdict(None), results=(CriterionResult("seven", "yes", 1.0, True),))
    if place == 0:
        return Rollout(request, right(request).completion, checked)
    return Rollout(request, Completion(error="no token within 90 s"), None) if place == 1 else None


def failing(*causes: str) -> Answers:
    """The first answers fail for these causes."""

    def made(request: RolloutRequest, place: int) -> Rollout | None:
        if place >= len(causes):
            return None
        return Rollout(request, Completion(error="it failed", cause=causes[place]), None)

    return Answers(made)


RUBRIC = {
    "version": 1,
    "id": "right",
    "criteria": [
        {"id": "right", "value": "It is right.", "choices": {"no": 0, "yes": 1}},
        {"id": "seven", "type": "contains", "value": "seven"},
    ],
}


def spec_of(settings: Config) -> RoundSpec:
    return round_spec(seed=7, rubric=RUBRIC, settings=settings.model_dump(mode="json"))


def asked(directory: Path, **sections: object) -> list[RolloutRequest]:
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2, **sections.pop("gate", {})}, **sections})  # type: ignore[dict-item]
    noted = Answers()
    answered(noted, settings, directory)
    return noted.requests


def answered(collector: Any, settings: Config, directory: Path) -> HeldOutAnswers:
    prompts = [prompt("t-1", (1,)), prompt("t-2", (2,))]
    return answer(prompts, (CANDIDATE, None), spec_of(settings), settings, collector, directory)


def test_misses_score_against_the_candidate_and_are_not_undecided(tmp_path: Path) -> None:
    settings = Config.model_validate(
        {"gate": {"min_tasks": 2, "samples": 2}, "training": {"max_undecided_share": 0.0}}
    )
    found = answered(missing(), settings, tmp_path)
    assert found.rewards == [((0.0, 1.0), (0.5, 0.5)), ((1.0, 1.0), (0.5, 0.5))]
    assert found.at_bound == [((0.0, 1.0), (0.5, 1.0)), ((1.0, 1.0), (0.5, 0.5))]
    assert found.missed == (1, 1)
    assert found.values == {"right": [((1.0,), (1.0,)), ((1.0, 1.0), (1.0, 1.0))]}
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [None, 1.0, 0.5, None, 1.0, 1.0, 0.5, 0.5]
    assert lines[0]["error"] == 'no recorded result for add({"a": 1})'


def test_the_comparison_has_the_misses_of_both_sides_and_the_bound_with_the_deployed_at_one(tmp_path: Path) -> None:
    def comparison(collector: object) -> Comparison:
        settings = Config.model_validate({"gate": {"samples": 2, "min_tasks": 1}})
        rubric = {"version": 1, "id": "right", "criteria": [{"id": "right", "type": "contains", "value": "seven"}]}
        spec = spec_of(settings).model_copy(
            update={"test": GateTest(epoch=1, number=1, alpha=0.25), "rubric": rubric}
        )
        made: Any = nullcontext(collector)
        prompts = [prompt(f"t-{place}", (place,)) for place in range(1, 9)]
        return GateComparison(spec, settings, tmp_path, lambda _: made).of(prompts, [], (CANDIDATE, None))

    found = comparison(missing())
    assert (found.tasks, found.undecided, found.candidate_missed, found.deployed_missed) == (8, 0, 1, 1)
    assert (found.scores[0].candidate, found.scores[0].deployed) == (0.5, 0.5)
    assert found.gain == pytest.approx(3.5 / 8)
    assert found.lower_at_bound is not None
    assert found.lower_at_bound < found.lower
    assert [(each.criterion, each.tasks) for each in found.criteria] == [("right", 8)]
    wires = [(each.criterion, each.tasks, each.gain) for each in found.tripwires]
    assert wires == [("longer", 7, 0.0), ("shorter", 7, 0.0), ("cut", 7, 0.0)], "of t-1, no seed has two answers"
    alone = comparison(Answers())
    assert (alone.candidate_missed, alone.deployed_missed, alone.lower_at_bound) == (0, 0, None)


def test_undecided_answers_beside_misses_stay_undecided(tmp_path: Path) -> None:
    limit = {"max_undecided_share": 1}
    settings = Config.model_validate({"gate": {"min_tasks": 2, "samples": 2}, "training": limit})
    with pytest.raises(TrainError, match=r"of 2 held-out tasks only 1 have a verdict for both.*3 of 8 answers are"):
        answered(missing(None), settings, tmp_path)


def test_a_judge_that_leaves_too_few_tasks_for_the_gate_rejects_no_candidate(tmp_path: Path) -> None:
    """Six answers of each side in eight are within what it may have, and leave only one of four tasks."""
    limit = {"max_undecided_share": 0.75}
    settings = Config.model_validate({"gate": {"samples": 2, "min_tasks": 2}, "training": limit})
    prompts = [prompt(f"t-{place}", (place,)) for place in range(4)]

    def without(tasks: int) -> HeldOutAnswers:
        lost = {f"t-{place}" for place in range(tasks)}

        def made(request: RolloutRequest, _: int) -> Rollout | None:
            is_lost = request.prompt.task.task_id in lost
            return Rollout(request, right(request).completion, verdict(None)) if is_lost else None

        collector: Any = Answers(made)
        return answer(prompts, (CANDIDATE, None), spec_of(settings), settings, collector, tmp_path)

    assert without(2).rewards[0] == ((None, None), (None, None))
    with pytest.raises(TrainError, match=r"of 4 held-out tasks only 1 have a verdict for both adapters") as caught:
        without(3)
    assert caught.value.retryable


def test_undecided_answers_are_limited_on_each_side(tmp_path: Path) -> None:
    limit = {"max_undecided_share": 0.4}
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2}, "training": limit})
    with pytest.raises(TrainError, match=r"reward the candidate's answers.*2 of 4 are undecided"):
        answered(Answers(undecided), settings, tmp_path)


def test_a_criterion_of_an_undecided_answer_is_undecided_unless_a_check_has_decided_it(tmp_path: Path) -> None:
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2}, "training": {"max_undecided_share": 1}})
    found = answered(Answers(undecided), settings, tmp_path)
    assert found.rewards[0] == ((None, None), (1.0, 1.0))
    assert found.values == {"seven": [((1.0, None), ()), ((), ())]}


def test_what_the_engine_failed_is_undecided_and_what_the_agent_failed_is_scored(tmp_path: Path) -> None:
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2}, "training": {"max_undecided_share": 1}})
    found = answered(failing("engine_error", "abandoned_call"), settings, tmp_path)
    assert found.rewards[0] == ((None, 0.0), (1.0, 1.0))
    assert found.failed == (1, 0)
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2}, "training": {"max_undecided_share": 0}})
    with pytest.raises(TrainError, match=r"reward the candidate's answers.*2 of 4 are undecided.*it failed"):
        answered(failing("engine_error", "broken_stream"), settings, tmp_path)


def test_what_the_judge_left_undecided_is_asked_once_more_at_the_end(tmp_path: Path) -> None:
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2}})
    graded: list[str] = []

    def grade(work: Exchange) -> Verdict:
        graded.append(work.query)
        return verdict(1.0)

    class Recovering(Answers):
        def grade_again(self, batch: RolloutBatch, on_rollout: Callable[[Rollout], None]) -> RolloutBatch:
            with Collector([], grade, max_thread=2, timeout_seconds=60) as collector:
                return collector.grade_again(batch, on_rollout)

    found = answered(Recovering(undecided), settings, tmp_path)
    assert (len(graded), found.rewards[0]) == (1, ((1.0, None), (1.0, 1.0)))
    answers = read_answers(tmp_path / "evaluation.jsonl", {"t-1"}) or []
    assert [answer["reward"] for answer in answers if answer["side"] == "candidate"] == [1.0, None]
    assert len(answers) == 4, "the last grade of each answer"


def test_the_gates_answers_have_the_servers_limits_and_not_the_rounds(tmp_path: Path) -> None:
    requests = asked(tmp_path, rollout={"max_completion_tokens": 16, "temperature": 0.7, "timeout_seconds": 100})
    assert len(requests) == 8
    assert {(each.as_served, each.max_tokens, each.temperature, each.seconds) for each in requests} == {
        (True, None, None, 90.0)
    }


def test_the_agents_temperature_is_used_where_it_is_told(tmp_path: Path) -> None:
    assert {each.temperature for each in asked(tmp_path, gate={"temperature": 0.3})} == {0.3}


def test_both_sides_are_asked_with_the_same_seeds(tmp_path: Path) -> None:
    requests = asked(tmp_path)
    seeds = [[each.seed for each in requests if (each.adapter is None) is deployed] for deployed in (False, True)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


def test_a_task_of_a_suite_is_asked_with_other_seeds_than_a_held_out_one_of_the_same_id(tmp_path: Path) -> None:
    """Answers that an earlier worker stored are found by weights, task and seed."""
    held_out = prompt("math/t-1")
    of_suite = replace(held_out, task=held_out.task.model_copy(update={"suite": "math"}))
    settings = Config.model_validate({"gate": {"min_tasks": 1, "samples": 2}})
    seeds = []
    for each in (held_out, of_suite):
        noted = Answers()
        answer([each], (CANDIDATE, None), spec_of(settings), settings, noted, tmp_path)  # type: ignore[arg-type]
        seeds.append({request.seed for request in noted.requests})
    assert [len(each) for each in seeds] == [2, 2]
    assert not seeds[0] & seeds[1]
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [line.get("suite") for line in lines] == [None] * 4 + ["math"] * 4
    assert len(read_answers(tmp_path / "evaluation.jsonl", {"math/t-1"}) or ()) == 4


def test_the_comparison_has_each_suite_graded_by_its_own_rubric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a task without a decided answer is counted and left out, as in the gate."""
    settings = Config.model_validate({"gate": {"samples": 2, "min_tasks": 1}})
    rubric = {"version": 1, "id": "right", "criteria": [{"id": "right", "type": "contains", "value": "seven"}]}
    test = GateTest(epoch=1, number=1, alpha=0.25)
    spec = spec_of(settings).model_copy(update={"test": test, "rubric": rubric})
    graded_by = []

    def make_grade(own: RoundSpec, _directory: Path, purpose: Purpose, _pause: object) -> Grade:
        graded_by.append((own.rubric["id"], purpose))
        return lambda work: verdict(1.0)

    found = Round(spec, tmp_path, settings, make_grade)
    prompts = [prompt(f"t-{place}", (place,)) for place in range(1, 9)]
    suites = [
        Suite(name=name, tasks=[], rubric={**rubric, "id": own}, margin=None)
        for name, own in (("same", "right"), ("other", "other"))
    ]

    def without_verdict(request: RolloutRequest, place: int) -> Rollout | None:
        """Of the candidate's answers to t-1."""
        return Rollout(request, right(request).completion, verdict(None)) if place < 2 else None

    collectors = [Answers(), Answers(without_verdict), Answers()]
    monkeypatch.setattr(Collector, "of", lambda *_, **__: nullcontext(collectors.pop(0)))
    gate = GateComparison(spec, settings, tmp_path, found._collector_of)
    whole = gate.of(prompts, [(suites[0], prompts), (suites[1], prompts[:2])], (CANDIDATE, None))
    assert (whole.tasks, whole.gain) == (8, 0.0)
    same, other = whole.suites
    assert (same.name, same.tasks, same.undecided) == ("same", 7, 1)
    assert (other.name, other.tasks, other.conversations, other.undecided) == ("other", 2, 2, 0)
    assert other.gain == pytest.approx(other.candidate_mean - other.deployed_mean)
    assert graded_by == [("right", Purpose.GATES), ("other", Purpose.GATES)]
