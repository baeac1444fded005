"""What a round leaves of its rollouts and of the gate's answers, line by line."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from flywheel.records.verdict import CriterionResult
from flywheel.training.data.graded_rollouts import StoredSteps
from flywheel.training.data.rollout import LoadedAdapter, Rollout, RolloutBatch
from flywheel.training.data.rollout_file import append_answer, rollout_line, rollouts
from flywheel.training.recorded.recorded_rollout import ToolSetup
from tests.training.data.rollouts import batch, missed, prompt, reply, request, rollout, verdict
from tests.training.engine.scripted_session import ScriptedPolicy, recorded_task, rollout_request
from tests.training.recorded.recordings import ADD, call, said, steps

RESULTS = (CriterionResult("boxed", "yes", 1.0, True), CriterionResult("right", "no", 0.0, False, "3 + 4 is 7", "h"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_utf_8_and_json_cannot_have_is_replaced(tmp_path: Path) -> None:
    """Half of a surrogate pair, and what engines may return that is no number."""
    completion = reply(prompt("t-0"), (8, 9), (float("nan"), -float("inf")), "\ud800 7")
    completion = replace(completion, steps=({"role": "tool", "content": "\ud800"},))
    StoredSteps(tmp_path).append(0, RolloutBatch((replace(rollout(0, 1), completion=completion),)), "group")
    [line] = rollouts(tmp_path)
    assert (line["answer"], line["samples"][0]["logprobs"][-2:]) == ("? 7", [None, None])
    assert line["steps"] == [{"role": "tool", "content": "?"}]


def test_criteria_come_with_the_judges_reasons() -> None:
    done = rollout(0, 0.5)
    assert done.verdict is not None
    line = rollout_line(replace(done, verdict=replace(done.verdict, results=RESULTS)), 1, 0.0)
    assert line["criteria"] == [
        {"criterion": "boxed", "choice": "yes", "value": 1.0, "passed": True, "reason": ""},
        {"criterion": "right", "choice": "no", "value": 0.0, "passed": False, "reason": "3 + 4 is 7"},
    ]


def test_the_rollouts_of_a_step_are_written_with_their_groups_advantages(tmp_path: Path) -> None:
    for step in (0, 1):
        StoredSteps(tmp_path).append(step, batch([1, 0, None, 0, 1], [0.5, 0.5]), "none")
    written = list(rollouts(tmp_path))
    assert [line["step"] for line in written] == [1] * 7 + [2] * 7
    assert [line["advantage"] for line in written[:7]] == [0.5, -0.5, None, -0.5, 0.5, None, None]
    assert [line["dropped"] for line in written[:7]] == [None] * 5 + ["rewards"] * 2


def test_all_rollouts_of_a_dropped_group_are_written_with_the_reason_and_without_advantage(tmp_path: Path) -> None:
    group = *(rollout(0, score) for score in (0, 1, 0, 1)), *(missed(0) for _ in range(2))
    StoredSteps(tmp_path).append(0, RolloutBatch(group), "group")
    written = list(rollouts(tmp_path))
    assert [(line["reward"], line["advantage"], line["dropped"]) for line in written] == [
        *((score, None, "misses") for score in (0, 1, 0, 1, None, None))
    ]
    assert written[-1]["error"] == 'no recorded result for add({"a": 1})'


def test_the_gates_answers_name_their_side(tmp_path: Path) -> None:
    candidate, deployed = LoadedAdapter("r0002-5", 5), LoadedAdapter("r0001-6", 6)
    done = rollout(0, 1)
    for other in (deployed, None):
        sides = [
            Rollout(request(0, 7, of=prompt("t-1"), adapter=side), done.completion, done.verdict)
            for side in (candidate, other)
        ]
        for side in sides:
            append_answer(tmp_path, side, candidate)
    written = lines(tmp_path / "evaluation.jsonl")
    assert [line["side"] for line in written] == ["candidate", "deployed"] * 2
    assert written[0] == {
        "task_id": "t-1",
        "side": "candidate",
        "seed": 7,
        "steps": [],
        "answer": "seven",
        "truncated": False,
        "loop": "",
        "reward": 1,
        "criteria": [],
        "error": "",
    }


def test_a_trajectory_has_its_steps_and_a_line_of_lists_for_each_sample(tmp_path: Path) -> None:
    """Of a real loop whose second turn does not continue the first; the gate's answers have the same steps."""
    trace = steps((call("add", {"a": 1}), "1"))
    asked = rollout_request(recorded_task(trace, (ADD,)))
    thinking = {**said(call("add", {"a": 1}, "r-1")), "reasoning": "Hm."}
    policy = ScriptedPolicy([thinking, {"role": "assistant", "content": "It is 1."}])
    done = asyncio.run(policy.roll_out(asked, ToolSetup()))
    made = Rollout(asked, done, verdict(1))
    line = json.loads(json.dumps(rollout_line(made, 1, 0.5)))
    assert [len(line["samples"]), done.forks] == [2, 1]
    for sample, made_of, length in zip(line["samples"], done.samples, policy.lengths, strict=True):
        assert sample["token_ids"] == list(made_of.token_ids)
        assert {len(values) for values in sample.values()} == {len(sample["token_ids"])}
        assert sum(sample["loss_mask"]) == length
        assert sample["logprobs"][-length:] == [-0.1] * length
        assert sample["text"][-length:] == [str(token) for token in sample["token_ids"][-length:]]
    assert [step["role"] for step in line["steps"]] == ["assistant", "tool"]
    assert line["steps"][1] == {"role": "tool", "tool_call_id": "r-1", "name": "add", "content": "1"}
    append_answer(tmp_path, made, None)
    [answer] = lines(tmp_path / "evaluation.jsonl")
    assert (answer["steps"], answer["answer"]) == (line["steps"], "It is 1.")
