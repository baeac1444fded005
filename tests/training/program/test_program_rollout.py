"""A rollout of the user's agent: what its run and its calls make. The engine and the program are scripted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from flywheel.errors import TrainError
from flywheel.records.program_run import CallFault, FailureCause, RunResult
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, RewardWeights, Rollout, RolloutBatch, RolloutRequest, exchange
from flywheel.training.data.rollout_file import rollout_line
from flywheel.training.data.samples import CallTokens
from flywheel.training.engine.rollout_engine import ProgramSetup, roll_out
from flywheel.training.program.agent_program import ModelEndpoint
from tests.factories.task import round_task
from tests.training.data.rollouts import verdict

LINE = {"task_id": "t-1", "main_query": "What is 3 plus 4?", "metadata": {"level": {"deep": 3}}}
SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 plus 4?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "add"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]}
SETUP = ProgramSetup(models={"planner": "plan", "writer": "write"}, trained="planner", max_turns=4)


def request() -> RolloutRequest:
    task = round_task(reference="", prompt=[QUESTION], agent="program", line=LINE)
    return RolloutRequest(Prompt(task, (5, 6)), 0, 1, 1.0, 8, None)


def call(*messages: Any, says: Any = "It is 7.", prompt: tuple[int, ...] = (1, 2), **more: Any) -> CallTokens:
    answer = says if isinstance(says, dict) else {"role": "assistant", "content": says}
    identity = tuple(map(str, messages))
    made = CallTokens(prompt, (8, 9), (-0.5, -0.5), ("a", "b"), identity, str(answer), finish_reason="stop")
    return replace(made, messages=messages, answer=answer, **more)


class Session:
    def __init__(
        self,
        *calls: CallTokens,
        is_truncated: bool = False,
        is_full: bool = False,
        fault: tuple[CallFault, str] | None = None,
    ) -> None:
        self.calls, self.is_truncated, self.is_full, self.fault = calls, is_truncated, is_full, fault


class Pool:
    def __init__(self, result: RunResult) -> None:
        self.result = result
        self.asked: list[Any] = []

    async def run(self, task: Mapping[str, Any], models: Mapping[str, ModelEndpoint], trained: str) -> RunResult:
        self.asked.append((task, models, trained))
        return self.result


async def made(result: RunResult, *calls: CallTokens, setup: ProgramSetup = SETUP, **session: Any) -> Completion:
    return await roll_out(request(), Session(*calls, **session), "http://here/v1", Pool(result).run, setup)


async def test_the_program_gets_the_whole_task_and_the_models_of_all_targets() -> None:
    pool = Pool(RunResult(reward=0.5, response="It is 7.", metrics={"turns": 1}))
    found = await roll_out(request(), Session(call(QUESTION)), "http://here/v1", pool.run, SETUP)
    [(task, models, trained)] = pool.asked
    assert (task, trained) == (LINE, "planner")
    assert {name: (model.base_url, model.model) for name, model in models.items()} == {
        "planner": ("http://here/v1", "plan"),
        "writer": ("http://here/v1", "write"),
    }
    assert (found.text, found.error, found.cause, found.turns) == ("It is 7.", "", "", 1)
    assert found.run == pool.result
    # The last message is the answer, and no step.
    assert found.steps == ()


async def test_steps_are_what_the_agent_added_to_its_conversations() -> None:
    first = call(SYSTEM, QUESTION, says=CALL)
    second = call(SYSTEM, QUESTION, CALL, RESULT, says="It is 7.", prompt=(1, 2, 8, 9, 3))
    second = replace(second, identity=(*first.identity, first.reply, str(RESULT)))
    # Another conversation, of a helper with a prompt of its own.
    helper = call({"role": "user", "content": "Check: 7"}, says="Right.", prompt=(4,))
    found = await made(RunResult(response="Seven"), first, second, helper)
    assert (found.forks, len(found.samples), found.turns) == (1, 2, 3)
    assert [(step["role"], step["content"]) for step in found.steps] == [
        ("assistant", ""),
        ("tool", "7"),
        ("assistant", "It is 7."),
        ("assistant", "Right."),
    ]
    assert found.steps[0]["tool_calls"] == CALL["tool_calls"]
    shown = exchange(request().prompt, found)
    assert (shown.query, shown.answer, shown.trajectory) == ("What is 3 plus 4?", "Seven", found.steps)


async def test_a_failure_keeps_what_was_said_for_people_and_has_no_reward() -> None:
    found = await made(RunResult(cause="raised", error="it raised KeyError: 'x'"), call(QUESTION))
    assert (found.error, found.cause) == ("the agent failed (raised): it raised KeyError: 'x'", "raised")
    assert [step["content"] for step in found.steps] == ["It is 7."]
    assert Rollout(request(), found, None).reward is None
    line = rollout_line(Rollout(request(), found, None), 1, None)
    assert line["program"] == {"reward": None, "metrics": {}, "seconds": 0.0, "failure": "raised"}
    assert line["error"] == found.error


async def test_an_agent_that_asks_another_model_is_told() -> None:
    found = await made(RunResult(reward=1.0, response="7"))
    assert found.cause == "no_calls"
    assert "it must ask the one that it is given" in found.error


@pytest.mark.parametrize("fault", ["engine_error", "broken_stream", "abandoned_call"])
async def test_a_fault_of_the_machine_is_nobodys_reward(fault: CallFault) -> None:
    """Also of an agent that has noticed nothing, or made the best of it."""
    said = (fault, "the engine failed to answer")
    sorry = RunResult(reward=0.0, response="Sorry")
    for limit in ({}, {"is_truncated": True}, {"is_full": True}):
        found = await made(sorry, call(QUESTION), fault=said, **limit)
        assert found.cause == fault
        assert found.error == (
            f"a call of the model has no answer, nor has a retry of it ({fault}): the engine failed to answer"
        )
        assert Rollout(request(), found, None, RewardWeights(0, 1)).reward is None
    batch = RolloutBatch((Rollout(request(), found, None),))
    assert batch.summary()["program"]["failures"] == {fault: 1}
    with pytest.raises(TrainError, match="run the agent" if fault == "abandoned_call" else "1 of 1 are undecided"):
        batch.refuse_failed(0.5) or batch.refuse_undecided(0.5)
    looped = call(QUESTION, says=LOOP, finish_reason="length")
    assert Rollout(request(), await made(sorry, looped, fault=said), None, RewardWeights(0, 1)).reward is None


@pytest.mark.parametrize(
    ("fault", "cause", "counted"),
    [
        ("engine_error", "raised", "engine_error"),
        ("broken_stream", "raised", "broken_stream"),
        ("engine_error", "timeout", "engine_error"),
        # A run that is ended gives up its call.
        ("abandoned_call", "timeout", "timeout"),
    ],
)
async def test_a_run_that_fails_on_a_fault_is_counted_by_it(
    fault: CallFault, cause: FailureCause, counted: str
) -> None:
    result = RunResult(cause=cause, error="it failed")
    for calls in ((), (call(QUESTION),)):
        found = await made(result, *calls, fault=(fault, "the engine failed to answer"), is_truncated=True)
        assert (found.cause, found.text) == (counted, "")


@pytest.mark.parametrize("limit", [{"is_truncated": True}, {"is_full": True}])
async def test_a_run_that_fails_at_a_limit_is_truncated(limit: dict[str, bool]) -> None:
    result = RunResult(cause="raised", error="BadRequestError")
    found = await made(result, call(QUESTION), **limit)
    assert (found.error, found.truncated, found.text) == ("", True, "It is 7.")
    own = await made(result, call(QUESTION), setup=replace(SETUP, needs_reward=True), **limit)
    assert (own.cause, own.truncated) == ("raised", True)


async def test_the_rollouts_limits_truncate_and_a_limit_of_the_agent_for_its_own_call_does_not() -> None:
    own = call(QUESTION, finish_reason="length")
    found = await made(RunResult(response="It is"), own, is_truncated=True)
    assert (found.error, found.truncated) == ("", True)
    assert not (await made(RunResult(response="It is 7."), own)).truncated
    failed = await made(RunResult(cause="raised", error="JSONDecodeError"), own)
    assert (failed.cause, failed.truncated) == ("raised", False), "no limit of the rollout explains it"
    # The agent has dealt with a context that was full.
    assert not (await made(RunResult(response="It is 7."), call(QUESTION), is_full=True)).truncated


LOOP = "Wait, I have to look again. " * 80
LOOPS: list[dict[str, Any]] = [
    {"content": LOOP},
    {"content": "", "reasoning": LOOP},
    {"content": None, "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": f'{{"a": "{LOOP}'}}]},
]


@pytest.mark.parametrize("message", LOOPS, ids=["content", "reasoning", "arguments"])
async def test_a_loop_in_any_message_costs_the_reward(message: dict[str, Any]) -> None:
    """Also under the reward of the workflow, which may find its answer in front of the loop."""
    cut = call(QUESTION, says={"role": "assistant", **message}, finish_reason="length")
    found = await made(RunResult(reward=1.0, response="It is 7."), cut, call(QUESTION, says="It is 7."))
    assert "is repeated" in found.loop and not found.truncated
    own = RewardWeights(0, 1)
    for weights, reward in ((own, 0.0), (replace(own, loop=-1.0), -1.0), (replace(own, loop=None), 1.0)):
        assert Rollout(request(), found, None, weights).reward == reward
    less = await made(RunResult(reward=-2.0, response="7"), cut)
    assert Rollout(request(), less, None, own).reward == -2.0
    ended = await made(RunResult(reward=1.0, response="7"), replace(cut, finish_reason="stop"))
    assert (ended.loop, Rollout(request(), ended, None, own).reward) == ("", 1.0)


async def test_an_agent_that_fails_on_a_loop_has_the_reward_of_one() -> None:
    result = RunResult(cause="raised", error="JSONDecodeError")
    cut = call(QUESTION, says=LOOP, finish_reason="length")
    setup, weights = replace(SETUP, needs_reward=True), RewardWeights(0, 1)
    found = await made(result, cut, call(QUESTION), setup=setup)
    rollout = Rollout(request(), found, None, weights)
    assert (found.cause, found.truncated, rollout.reward, rollout.failure) == ("", False, 0.0, "")
    assert (await made(result, cut, call(QUESTION), setup=setup, is_truncated=True)).truncated
    left = await made(result, cut, call(QUESTION), setup=replace(setup, rewards_loops=False))
    assert (left.cause, Rollout(request(), left, None, replace(weights, loop=None)).reward) == ("raised", None)


@pytest.mark.parametrize(
    ("weights", "reward"),
    [
        (RewardWeights(), 0.25),
        (RewardWeights(0, 1), 3.0),
        (RewardWeights(1, 1), 1.625),
        (RewardWeights(3, 1), 0.9375),
    ],
)
async def test_the_reward_is_the_weighted_mean(weights: RewardWeights, reward: float) -> None:
    done = await made(RunResult(reward=3.0, response="7"), call(QUESTION))
    assert Rollout(request(), done, verdict(0.25), weights).reward == reward
    without = await made(RunResult(response="7"), call(QUESTION))
    missing = Rollout(request(), without, verdict(0.25), weights).reward
    assert missing == (None if weights.program else 0.25)


async def test_failures_are_counted_and_refused_if_they_are_many() -> None:
    done = await made(RunResult(reward=1.0, response="7", metrics={"boxes": 2.0}, seconds=1.5), call(QUESTION))
    bad = await made(RunResult(cause="timeout", error="it ran longer than 5 s"), call(QUESTION))
    batch = RolloutBatch((*(Rollout(request(), done, verdict(1.0)) for _ in range(3)), Rollout(request(), bad, None)))
    assert batch.summary()["program"] == {
        "failures": {"timeout": 1},
        "reward_mean": 1.0,
        "metrics": {"boxes": 2.0},
        "seconds_mean": 1.5,
    }
    assert (batch.undecided, batch.summary()["undecided"]) == (0, 0)
    late = RolloutBatch((Rollout(request(), replace(done, run=replace(done.run, late_calls=2)), verdict(1.0)),))
    assert late.summary()["program"]["failures"] == {"late_call": 2}
    batch.refuse_failed(0.5)
    batch.refuse_undecided(0.0)
    with pytest.raises(TrainError, match=r"it failed in 1 of 4 rollouts.*1 times: the agent failed .timeout."):
        batch.refuse_failed(0.1)
