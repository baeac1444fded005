"""The model that plays tools, truthful and misbehaving."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flywheel.cli.show import turns
from flywheel.config import SimulatorSettings
from flywheel.errors import TrainError
from flywheel.training.data.answered_calls import Outcome
from flywheel.training.recorded.call_key import tools_by_name
from flywheel.training.recorded.recorded_tools import RecordedTools, Simulation
from flywheel.training.recorded.recordings import results_of
from flywheel.training.recorded.simulator import Simulator, question
from tests.cases import for_each
from tests.local_server import JsonHandler, LocalServer
from tests.training.recorded.recordings import ADD, call, recording

Answer = tuple[int, Any]
Play = Callable[[dict[str, Any]], Answer]


def said(content: Any, finish_reason: str = "stop") -> Answer:
    return 200, {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}]}


class ToolModel(LocalServer):
    """An OpenAI-compatible model in this process, which answers as `play` says; text is sent as it is."""

    def __init__(self, play: Play = lambda _: said("3")) -> None:
        self.play = play
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        model = self

        class Handler(JsonHandler):
            def post(self, request: dict[str, Any]) -> None:
                model.requests.append(request)
                model.keys.append(self.headers["authorization"])
                status, content = model.play(request)
                body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_head(status, len(body) + (status == 206))
                self.wfile.write(body)
                self.close_connection = status == 206

        super().__init__(Handler)

    def simulator(self, **settings: Any) -> Simulator:
        return Simulator(
            SimulatorSettings.model_validate({"model": "tools", "base_url": self.base_url, **settings}),
            longest_wait=0.01,
        )


@pytest.fixture
def model() -> Iterator[ToolModel]:
    with ToolModel() as running:
        yield running


TRACE = recording((call("add", {"a": 1, "b": 2}), "3"), (call("add", {"a": 5, "b": 5}), "10"))
EXAMPLES = results_of(TRACE).examples


def asked(a: Any = 7) -> Simulation:
    return Simulation(tools_by_name([ADD])["add"], {"a": a, "b": 1}, EXAMPLES)


def test_the_model_is_told_the_tool_its_recorded_calls_and_the_new_call(
    model: ToolModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-of-tools|another")
    model.play = lambda _: said(" 8\n")
    simulator = model.simulator(api_key_env="MY_KEY", temperature=0.5, max_tokens=99)
    assert simulator(asked()) == "8"
    (request,) = model.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tools", 0.5, 99)
    assert model.keys == ["Bearer secret-of-tools"]
    system, user = (message["content"] for message in request["messages"])
    assert "exactly what the tool would return" in system
    assert user == question(asked())
    assert user.splitlines() == [
        "Definition:",
        json.dumps(ADD["function"]),
        "",
        "Recorded calls:",
        '{"arguments": {"a": 1, "b": 2}, "result": "3"}',
        '{"arguments": {"a": 5, "b": 5}, "result": "10"}',
        "",
        "New call of add:",
        '{"arguments": {"a": 7, "b": 1}}',
    ]


def test_equal_calls_of_one_task_get_one_answer_and_others_their_own(model: ToolModel) -> None:
    numbers = iter(range(100))
    model.play = lambda _: said(str(next(numbers)))
    simulator = model.simulator()
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(simulator, [asked()] * 8))) == 1
    assert len(model.requests) == 1
    # 7 and "7" are not the same call.
    assert len({simulator(asked(a)) for a in (7, "7", 8)}) == 3
    assert simulator(Simulation(asked().tool, asked().arguments, ())) == "3", "of another task"


@for_each(
    ("answer", "why", "retryable"),
    [
        ((500, {"error": {"message": "broken"}}), "it answered 500 (broken)", True),
        ((429, {}), "it answered 429", True),
        ((200, "<html>"), "the response is not JSON", True),
        ((206, '{"choices": ['), "", True),
        ((200, {"error": {"message": "overloaded"}}), "overloaded", True),
        ((200, []), "without a choice", True),
        ((200, {"choices": "x"}), "its answer has no text", False),
        ((401, {"error": {"message": "bad key"}}), "it answered 401 (bad key)", False),
        ((404, {"error": "no such model"}), "it answered 404 (no such model)", False),
        ((400, {"error": "no"}), "it answered 400 (no)", False),
        (said(""), "its answer has no text", False),
        (said(None), "its answer has no text", False),
        (said("3", "length"), "longer than rollout.tools.simulator.max_tokens", False),
    ],
)
def test_a_failure_is_an_error_of_that_call_and_the_next_one_tries_again(
    answer: Answer, why: str, retryable: bool
) -> None:
    with ToolModel(lambda _: answer) as model:
        simulator = model.simulator()
        with pytest.raises(TrainError) as caught:
            simulator(asked())
        assert why in caught.value.why
        assert caught.value.attempted == f"simulate a call of add by tools at {model.base_url}"
        assert caught.value.retryable is retryable
        assert len(model.requests) == (4 if retryable else 1)
        model.play = lambda _: said("3")
        assert simulator(asked()) == "3"


def test_an_outage_of_a_moment_is_retried(model: ToolModel) -> None:
    answers = iter([(500, {}), (503, {}), said("3")])
    model.play = lambda _: next(answers)
    assert model.simulator()(asked()) == "3"


def test_a_model_that_is_slow_is_given_up(model: ToolModel) -> None:
    released = threading.Event()

    def play(_: dict[str, Any]) -> Answer:
        released.wait(60)
        return said("3")

    model.play = play
    with pytest.raises(TrainError, match=r"no complete response within 0\.2 s"):
        model.simulator(timeout_seconds=0.2)(asked())
    released.set()


def test_parameters_that_the_endpoint_rejects_are_left_out(model: ToolModel) -> None:
    def play(request: dict[str, Any]) -> Answer:
        if "max_tokens" in request:
            return 400, {"error": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}
        if "temperature" in request:
            return 400, {"error": "Unsupported value: 'temperature' does not support 0.0 with this model."}
        return said("3")

    model.play = play
    simulator = model.simulator()
    assert [simulator(asked(a)) for a in (7, 8)] == ["3", "3"]
    assert len(model.requests) == 4
    assert model.requests[-1]["max_completion_tokens"] == 1024


@for_each(
    ("settings", "why"),
    [
        ({"base_url": None}, "its endpoint is no URL"),
        (
            {"base_url": "https://api.openai.com/v1", "api_key_env": "NO_KEY"},
            "NO_KEY with its key is not set",
        ),
        ({"api_key_env": "ODD_KEY"}, "ODD_KEY with its key has characters that no key has"),
    ],
)
def test_settings_that_cannot_work_are_named_before_the_first_call(
    settings: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD_KEY", "schlüssel")
    monkeypatch.setenv("OPENAI_BASE_URL", "localhost")
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(TrainError, match=why):
        Simulator(
            SimulatorSettings.model_validate({"model": "tools", "base_url": "http://127.0.0.1:9/v1", **settings})
        )


def test_misses_of_a_rollout_are_answered_and_marked(model: ToolModel) -> None:
    model.play = lambda request: said("8" if '"a": 7' in request["messages"][1]["content"] else "?")
    tools = RecordedTools(TRACE.tools, results_of(TRACE), on_miss="simulate", simulate=model.simulator())
    turn = tools.answer([call("add", {"a": 1, "b": 2}), call("add", {"a": 7, "b": 1})])
    assert [each.outcome for each in turn.calls] == [Outcome.TRACE, Outcome.SIMULATED]
    assert [message["content"] for message in turn.messages] == ["3", "8"]
    assert [step.get("simulated") for step in turn.steps] == [None, True]
    assert all("simulated" not in message for message in turn.messages), "the policy is not told"
    assert list(turns(turn.steps)) == ["[tool add] 3", "[tool add, simulated] 8"]
    assert turn.ended_by == ""
    assert len(model.requests) == 1, "what is recorded is not simulated"
