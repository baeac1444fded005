"""A session: what it forces, records, strips and repeats. vLLM is scripted; `ray_session/test_endpoint.py` has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from flywheel.errors import TrainError
from flywheel.training.data.prompts import seed_of
from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.data.samples import identity_of, message_identity
from flywheel.training.engine.served_application import BASE_MODEL
from tests.training.engine.scripted_application import (
    TOO_LONG,
    ScriptedApplication,
    TalkativeApplication,
    answered,
    asking,
    message,
    session,
    started,
)


async def test_sampling_is_that_of_the_round_whatever_the_client_asks_for() -> None:
    app = ScriptedApplication()
    rollout = session(app, LoadedAdapter("r1-3", 3))
    tools = [{"type": "function", "function": {"name": "add"}}]
    sampling = {
        "temperature": 0.0, "top_p": 0.1, "top_k": 3, "min_p": 0.2, "presence_penalty": 2, "frequency_penalty": 2,
        "repetition_penalty": 2, "seed": 1, "n": 4, "stream": True, "stream_options": {"include_usage": True},
        "logit_bias": {"3": 100}, "bad_words": ["7"], "allowed_token_ids": [1], "ignore_eos": True,
        "logprobs": False, "include_reasoning": False, "return_token_ids": False, "use_beam_search": True,
        "truncate_prompt_tokens": 2, "prompt_logprobs": 1, "chat_template": "{{ 1 }}", "vllm_xargs": {"a": 1},
        "min_tokens": 9,
        "thinking_token_budget": 1,
    }  # fmt: skip
    await rollout.complete({**asking("?"), **sampling, "tools": tools, "max_tokens": 9, "stop": ["x"]})
    assert app.asked == [
        {
            "messages": asking("?")["messages"],
            "tools": tools,
            "max_tokens": 9,
            "stop": ["x"],
            "model": "r1-3",
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "stream": False,
            "seed": seed_of(11, 0),
            "logprobs": True,
            "return_token_ids": True,
            "include_reasoning": True,
        }
    ]


async def test_the_gates_rollouts_have_the_servers_sampling_and_the_gates_temperature() -> None:
    app = ScriptedApplication()
    await session(app, as_served=True, temperature=None).complete(asking("?", temperature=1.5, top_p=0.2))
    await session(app, as_served=True, temperature=0.3).complete(asking("?"))
    forced = {"model", "n", "stream", "seed", "logprobs", "return_token_ids", "include_reasoning", "messages"}
    assert set(app.asked[0]) == forced
    assert set(app.asked[1]) == forced | {"temperature"}
    assert (app.asked[0]["model"], app.asked[1]["temperature"]) == (BASE_MODEL, 0.3)
    assert [limits.server_default for limits in app.limits] == [True, True]


async def test_each_call_has_a_seed_of_its_own() -> None:
    app = ScriptedApplication()
    rollout = session(app)
    for text in "abc":
        await rollout.complete(asking(text))
    assert [body["seed"] for body in app.asked] == [seed_of(11, number) for number in range(3)]


async def test_the_client_receives_what_the_server_would_return() -> None:
    rollout = session(ScriptedApplication(answered(message(reasoning="3 + 4"))))
    reply = await rollout.complete(asking("?"))
    assert (reply.status, reply.error) == (200, "")
    assert (reply.body["model"], "prompt_token_ids" in reply.body) == ("agent", False)
    [choice] = reply.body["choices"]
    assert (choice["logprobs"], "token_ids" in choice) == (None, False)
    assert choice["message"] == message(reasoning="3 + 4")
    # Each is there if the client asked for it.
    reply = await rollout.complete(asking("?", logprobs=True, return_token_ids=True, include_reasoning=False))
    [choice] = reply.body["choices"]
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-0.5, -0.25]
    assert (reply.body["prompt_token_ids"], choice["token_ids"]) == ([5, 6, 7], [8, 9])
    assert "reasoning" not in choice["message"]


async def test_a_call_is_recorded_with_its_tokens() -> None:
    said = message(calls=[("add", '{"a": 3}')])
    rollout = session(
        ScriptedApplication(answered(said, logprobs=(-0.5, -9999.0), finish="tool_calls")),
        texts=lambda tokens: [f"({token})" for token in tokens],
    )
    body = asking("?", tools=[{"type": "function", "function": {"name": "add"}}])
    await rollout.complete(body)
    [call] = rollout.calls
    assert (call.prompt_ids, call.token_ids) == ((5, 6, 7), (8, 9))
    assert call.logprobs == (-0.5, None), "vLLM's -9999 is no logprob"
    assert (call.prompt_texts, call.texts) == (("(5)", "(6)", "(7)"), ("<8>", "<9>"))
    assert (call.identity, call.reply) == (identity_of(body), message_identity(said))
    assert (call.finish_reason, rollout.generated) == ("tool_calls", 2)


async def test_a_client_that_left_and_asks_again_has_the_answer_of_its_first_attempt() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app)
    first = asyncio.create_task(rollout.complete(asking("?"), attempt=0))
    await started(app)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    app.go.set()
    # Some clients count only their own retries, and not those of the program around them.
    assert (await rollout.complete(asking("?"), attempt=0)).status == 200
    assert (len(app.asked), len(rollout.calls), app.aborted) == (1, 1, 0)


async def test_a_retry_of_an_answered_call_has_its_answer() -> None:
    app = ScriptedApplication(answered(message("one")), answered(message("two")), answered(message("three")))
    rollout = session(app)
    one = await rollout.complete(asking("a"), attempt=0)
    assert await rollout.complete(asking("a"), attempt=1) == one
    two = await rollout.complete(asking("b"), attempt=0)
    assert await rollout.complete(asking("a"), attempt=2) == one, "a late retry of a parallel call"
    assert await rollout.complete(asking("b"), attempt=0) != two, "the client says that it does not retry"
    assert len(rollout.calls) == 3


async def test_equal_requests_of_a_client_that_does_not_count_are_sampled_anew() -> None:
    """An agent that takes the vote of several answers, one after the other and at the same time."""
    rollout = session(TalkativeApplication(), tokens=100, turn_tokens=1)
    replies = [await rollout.complete(asking("?")) for _ in range(3)]
    replies += await asyncio.gather(*(rollout.complete(asking("?")) for _ in range(3)))
    assert [reply.body["choices"][0]["message"]["content"] for reply in replies] == [
        f"answer {number}" for number in range(6)
    ]
    assert len(rollout.calls) == 6


async def test_a_retry_among_equal_calls_is_that_of_the_one_that_its_client_left() -> None:
    app = TalkativeApplication(hold=True)
    rollout = session(app, tokens=100, turn_tokens=1)
    calls = [asyncio.create_task(rollout.complete(asking("?"), attempt=0)) for _ in range(3)]
    await started(app, 3)
    calls[1].cancel()
    await asyncio.wait([calls[1]])
    calls[1] = asyncio.create_task(rollout.complete(asking("?"), attempt=1))
    await asyncio.sleep(0)
    app.go.set()
    texts = [reply.body["choices"][0]["message"]["content"] for reply in await asyncio.gather(*calls)]
    assert texts == ["answer 0", "answer 1", "answer 2"]
    assert (len(rollout.calls), rollout.fault) == (3, None)


async def test_a_retry_that_comes_before_its_client_is_known_to_have_left_settles_it() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app)
    calls = [asyncio.create_task(rollout.complete(asking("?"), attempt=0)) for _ in range(2)]
    await started(app, 2)
    calls.append(asyncio.create_task(rollout.complete(asking("?"), attempt=1)))
    await asyncio.sleep(0)
    calls[0].cancel()
    app.go.set()
    await asyncio.wait(calls)
    assert rollout.fault is None


async def test_a_refused_request_is_the_servers_error_and_no_call() -> None:
    app = ScriptedApplication(
        (400, TOO_LONG), (500, {"error": {"message": "failed", "code": 500}}), answered(message())
    )
    rollout = session(app)
    reply = await rollout.complete(asking("?"))
    assert (reply.status, reply.body, reply.is_too_long) == (400, TOO_LONG, True)
    reply = await rollout.complete(asking("?"))
    assert (reply.status, reply.error, reply.is_too_long) == (500, "failed", False)
    assert rollout.calls == ()
    assert (await rollout.complete(asking("?"))).status == 200


FAILED = (500, {"error": {"message": "CUDA error", "code": 500}})


async def test_an_error_of_the_engine_is_remembered_unless_a_retry_is_answered() -> None:
    rollout = session(ScriptedApplication(FAILED, answered(message()), answered(message())))
    await rollout.complete(asking("a"), attempt=0)
    await rollout.complete(asking("b"), attempt=0)
    failed = ("engine_error", "the engine failed: CUDA error (HTTP status 500)")
    assert rollout.fault == failed, "an answer to something else mends nothing"
    await rollout.complete(asking("a"), attempt=0)
    assert rollout.fault is None
    rollout = session(ScriptedApplication((503, {"error": "away"}), answered(message())), frozen={"write": None})
    for text, fault in (("a", "engine_error"), ("a", None)):
        await rollout.complete(asking(text, model="write"))
        assert (rollout.fault and rollout.fault[0]) == fault


async def test_what_the_engine_refuses_and_the_end_of_a_budget_are_no_faults() -> None:
    rollout = session(ScriptedApplication((400, TOO_LONG), answered(message())), turns=1)
    statuses = [(await rollout.complete(asking(text))).status for text in "abc"]
    assert (statuses, rollout.fault) == ([400, 200, 400], None)


async def test_a_parallel_call_with_the_same_body_is_no_retry() -> None:
    app = ScriptedApplication(FAILED, answered(message()), hold=True)
    rollout = session(app)
    calls = []
    for number in (1, 2):
        calls.append(asyncio.create_task(rollout.complete(asking("?"), attempt=0)))
        await started(app, number)
    app.go.set()
    assert [reply.status for reply in await asyncio.gather(*calls)] == [500, 200]
    assert rollout.fault is not None
    assert (await rollout.complete(asking("?"), attempt=1)).status == 200
    assert rollout.fault is None


@pytest.mark.parametrize("was_left", [False, True])
async def test_the_retry_of_a_failed_call_is_sampled_anew(was_left: bool) -> None:
    """And has not the answer of an equal one, as an agent that votes makes them."""
    said = [answered(message(text)) for text in ("one", "three", "four", "five")]
    app = ScriptedApplication(said[0], FAILED, said[1], FAILED, *said[2:], hold=True)
    rollout = session(app)
    calls = []
    for number in range(1, 5):
        calls.append(asyncio.create_task(rollout.complete(asking("?"), attempt=0)))
        await started(app, number)
    if was_left:
        calls[1].cancel()
        await asyncio.wait([calls[1]])
    app.go.set()
    await asyncio.wait(calls)
    await turns_of_the_loop()
    retries = [await rollout.complete(asking("?"), attempt=1) for _ in range(3)]
    texts = [reply.body["choices"][0]["message"]["content"] for reply in retries]
    assert texts == ["four", "five", "five"], "the third one is the retry of an answered call"
    assert (len(rollout.calls), rollout.fault) == (4, None)


async def test_a_call_that_its_client_gave_up_is_remembered_unless_a_retry_is_answered() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app)
    first = asyncio.create_task(rollout.complete(asking("?"), attempt=0))
    await started(app)
    assert rollout.fault is not None, "what is in flight when a run ends has no answer either"
    first.cancel()
    await asyncio.wait([first])
    app.go.set()
    await rollout.complete(asking("another"), attempt=0)
    assert rollout.fault is not None
    assert rollout.fault[0] == "abandoned_call"
    await rollout.complete(asking("?"), attempt=0)
    assert rollout.fault is None


async def test_budgets_end_a_rollout() -> None:
    app = ScriptedApplication()
    rollout = session(app, tokens=3)
    await rollout.complete(asking("a"))
    await rollout.complete(asking("b"))
    reply = await rollout.complete(asking("c"))
    assert [limits.tokens for limits in app.limits] == [3, 1]
    assert (reply.status, reply.error) == (400, "this rollout has reached its limit of 3 generated tokens")
    assert rollout.is_truncated
    app = ScriptedApplication()
    rollout = session(app, tokens=7, turn_tokens=4)
    for text in "abc":
        await rollout.complete(asking(text))
    assert [limits.tokens for limits in app.limits] == [4, 4, 3], "a turn has a limit of its own"
    rollout = session(app, turns=1)
    first = await rollout.complete(asking("a"))
    assert await rollout.complete(asking("a"), attempt=1) == first, "a retry is no turn"
    assert (await rollout.complete(asking("b"))).error == "this rollout has reached its limit of 1 calls of the model"


async def test_calls_at_the_same_time_reserve_what_they_may_use_and_give_the_rest_back() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app, tokens=100, turn_tokens=40)
    asked: list[dict[str, Any]] = [{}, {"max_tokens": 30}, {"max_completion_tokens": 900, "max_tokens": 1}, {}, {}]
    calls = [asyncio.create_task(rollout.complete(asking("?", **each))) for each in asked]
    await started(app, 2)
    await turns_of_the_loop()
    assert [limits.tokens for limits in app.limits] == [40, 40], "the others wait: 30 are free, and each wants 40"
    app.go.set()
    assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 5
    assert (rollout.generated, rollout.is_truncated) == (10, False)
    assert [limits.tokens for limits in app.limits[2:]] == [40, 40, 40], "each used two tokens"


async def test_a_call_is_not_cut_to_what_others_in_flight_leave_it() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app, tokens=100)
    calls = [asyncio.create_task(rollout.complete(asking("?", max_tokens=33))) for _ in range(4)]
    await started(app, 3)
    small = asyncio.create_task(rollout.complete(asking("?", max_tokens=1)))
    await turns_of_the_loop()
    assert len(app.asked) == 3, "one token is free: the fourth call waits, and the small one behind it"
    app.go.set()
    await asyncio.gather(*calls, small)
    assert app.limits[3].tokens is not None
    assert app.limits[3].tokens >= 33
    assert [body["max_tokens"] for body in app.asked] == [33, 33, 33, 33, 1]
    assert not rollout.is_truncated


async def test_a_call_is_cut_to_what_is_left_when_nothing_is_in_flight_any_more() -> None:
    app = TalkativeApplication()
    rollout = session(app, tokens=100)
    replies = await asyncio.gather(*(rollout.complete(asking("?", max_tokens=33)) for _ in range(5)))
    assert [reply.status for reply in replies] == [200, 200, 200, 200, 400]
    assert app.limits[3].tokens == 1
    assert (rollout.generated, rollout.is_truncated) == (100, True)


async def test_a_call_that_fails_gives_its_turn_to_one_that_waits() -> None:
    rollout = session(ScriptedApplication((400, TOO_LONG), FAILED, answered(message())), turns=1)
    replies = await asyncio.gather(*(rollout.complete(asking(text)) for text in "abcd"))
    assert [reply.status for reply in replies] == [400, 500, 200, 400]
    assert replies[3].error == "this rollout has reached its limit of 1 calls of the model"


async def test_a_call_that_a_limit_refuses_after_its_client_left_is_no_fault() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app, turns=1)
    first, second = [asyncio.create_task(rollout.complete(asking(text))) for text in "ab"]
    await started(app)
    second.cancel()
    await asyncio.wait([second])
    app.go.set()
    assert (await first).status == 200
    await turns_of_the_loop()
    assert (rollout.fault, rollout.is_truncated) == (None, True)


async def test_a_refusal_after_a_failure_does_not_hide_it() -> None:
    rollout = session(ScriptedApplication(FAILED, answered(message())), turns=1)
    await rollout.complete(asking("a"))
    await rollout.complete(asking("b"))
    assert (await rollout.complete(asking("a"))).is_beyond_limit
    assert rollout.fault is not None
    assert rollout.fault[0] == "engine_error"


@pytest.mark.parametrize("end", ["its client leaves", "its own client leaves", "the run ends", "the engine fails"])
async def test_a_call_that_waits_for_another_always_ends(end: str) -> None:
    fails = end == "the engine fails"
    app = ScriptedApplication(*([RuntimeError("core died")] if fails else []), hold=True)
    rollout = session(app, tokens=10)
    first, second = calls = [asyncio.create_task(rollout.complete(asking(text))) for text in "ab"]
    await started(app)
    await turns_of_the_loop()
    if end == "the run ends":
        rollout.close()
        assert [reply.status for reply in await asyncio.gather(*calls)] == [410, 410]
        assert len(app.asked) == 1
        return
    if end == "its client leaves":
        first.cancel()
    elif end == "its own client leaves":
        second.cancel()
        await asyncio.wait([second])
        second = asyncio.create_task(rollout.complete(asking("b")))
        await asyncio.sleep(0)
    app.go.set()
    await asyncio.wait([first, second])
    if fails:
        assert [str(each.exception()) for each in calls] == ["core died"] * 2
    else:
        assert second.result().status == 200
        assert [body["messages"][0]["content"] for body in app.asked] == ["a", "b"]


async def turns_of_the_loop() -> None:
    """All that can go on without an answer of the model has done so."""
    for _ in range(20):
        await asyncio.sleep(0)


CUT = answered(message("It"), finish="length")
"""Its prompt has three tokens and its message two."""


@pytest.mark.parametrize(
    ("asked", "limits", "is_cut"),
    [
        ({"max_tokens": 2}, {}, False),
        ({"max_completion_tokens": 2}, {"tokens": 9, "turn_tokens": 4}, False),
        ({"max_tokens": None}, {}, True),
        ({}, {"as_served": True}, True),
        ({"max_tokens": 2}, {"turn_tokens": 2}, True),
        ({"max_tokens": 50}, {"tokens": 2}, True),
        ({"max_completion_tokens": 50}, {"context": 5}, True),
        # Of a server elsewhere neither the context nor the tokens are known.
        ({"max_tokens": 2}, {"context": 0}, False),
        ({}, {"context": 0}, True),
    ],
    ids=str,
)
async def test_only_a_limit_of_the_rollout_or_the_server_truncates_it(
    asked: dict[str, Any], limits: dict[str, Any], is_cut: bool
) -> None:
    """An agent that asks itself a question of one token has cut its own message."""
    rollout = session(ScriptedApplication(CUT), **limits)
    await rollout.complete(asking("?", **asked))
    assert rollout.is_truncated is is_cut


async def test_a_message_that_was_cut_truncates_whatever_is_asked_afterwards() -> None:
    rollout = session(ScriptedApplication(CUT, answered(message("yes"))), turn_tokens=2)
    await rollout.complete(asking("What is 3 plus 4?"))
    await rollout.complete(asking("Was that right?", max_tokens=1))
    assert rollout.is_truncated
    ended = session(ScriptedApplication(answered(message("It is"))), turn_tokens=2)
    await ended.complete(asking("?"))
    assert not ended.is_truncated, "it ended by itself at its last token"
    frozen = session(ScriptedApplication(CUT), frozen={"writer": None})
    await frozen.complete({**asking("?"), "model": "writer"})
    assert not frozen.is_truncated, "what other models say is not trained on"


async def test_a_closed_session_aborts_its_calls_and_refuses_others() -> None:
    app = ScriptedApplication(hold=True)
    rollout = session(app)
    # Equal ones, too: a client that draws several answers.
    waiting = [asyncio.create_task(rollout.complete(asking(text), attempt=0)) for text in ("?", "?", "!")]
    await started(app, 3)
    rollout.close()
    assert [reply.status for reply in await asyncio.gather(*waiting)] == [410] * 3
    assert (await rollout.complete(asking("?"))).status == 410
    assert (app.aborted, rollout.calls) == (3, ())


async def test_errors_of_the_engine_reach_the_loop() -> None:
    class EngineDeadError(Exception):
        pass

    rollout = session(ScriptedApplication(EngineDeadError("core died")))
    with pytest.raises(EngineDeadError, match="core died"):
        await rollout.complete(asking("?"))
    assert rollout.fault is not None
    assert rollout.fault[0] == "engine_error"


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids", "logprobs"])
async def test_a_response_without_tokens_is_never_trained_on(missing: str) -> None:
    content = answered(message())
    holder: Mapping[str, Any] = content if missing in content else content["choices"][0]
    cast(dict[str, Any], holder)[missing] = None
    with pytest.raises(TrainError, match="vLLM's response has not all token ids and logprobs"):
        await session(ScriptedApplication(content)).complete(asking("?"))


async def test_frozen_models_answer_as_the_server_does_and_are_not_recorded() -> None:
    app = ScriptedApplication()
    writer = LoadedAdapter("r0002-9", 9)
    rollout = session(
        app, LoadedAdapter("r1-3", 3), model="plan", frozen={"write": writer, "judge": None}, turns=1, tokens=9
    )
    assert rollout.models == ("plan", "write", "judge")
    sampling = {"temperature": 0.1, "max_tokens": 5}
    replies = [await rollout.complete(asking("?", **{"model": name, **sampling})) for name in rollout.models]
    assert [reply.body["model"] for reply in replies] == ["plan", "write", "judge"]
    assert all("prompt_token_ids" not in reply.body for reply in replies)
    assert [body["model"] for body in app.asked] == ["r1-3", "r0002-9", BASE_MODEL]
    assert [body.get("temperature") for body in app.asked] == [0.7, None, None]
    assert [limits.tokens for limits in app.limits] == [9, None, None]
    assert (len(rollout.calls), rollout.generated) == (1, 2)
    # The limits are those of the trained model.
    assert (await rollout.complete(asking("and?", model="plan"))).status == 400
    assert (await rollout.complete(asking("and?", model="write"))).status == 200


async def test_in_the_gate_frozen_models_have_its_temperature() -> None:
    app = ScriptedApplication()
    rollout = session(app, as_served=True, temperature=0.3, frozen={"write": None})
    await rollout.complete(asking("?", model="write"))
    assert app.asked[0]["temperature"] == 0.3
