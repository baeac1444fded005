"""The checks of an agent's steps: repeated calls, useful calls, their format, timeouts; and what is no fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flywheel.errors import ConfigError
from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.file import parse_rubric
from flywheel.judge.rubric.rubric import CRITERION
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import CriterionResult, Exchange
from tests.judge.rubric.steps import made, tool

SEARCH = tool("search", "q", q={"type": "string"}, limit={"type": "integer", "default": 10})
PENALTIES = {"redundant-call", "timeout"}


def result(
    kind: str, *steps: tuple[ChatMessage, ...], value: Any = "", answer: str = "It is so.", **more: Any
) -> CriterionResult:
    is_penalty = kind in PENALTIES or value == "invalid"
    options = {"max": more.pop("max")} if "max" in more else {}
    raw = {"id": "c", "type": kind, "value": value, "weight": -1 if is_penalty else 1, **options}
    exchange = Exchange("q", answer, trajectory=sum(steps, ()), **more)
    return check(CRITERION.validate_python(raw), exchange)


def with_errors(*errors: str, **metadata: str) -> dict[str, Any]:
    return {"metadata": {"errors_json": json.dumps(errors), **metadata}}


HIT = made("search", {"q": "Oslo"}, "7 °C")
FAILED = made("search", {"q": "Oslo"}, "ConnectionError: no route")


@pytest.mark.parametrize(
    ("steps", "redundant"),
    [
        ((HIT, HIT), True),
        ((HIT,), False),
        ((), False),
        # The same arguments, written in another way.
        ((made("search", '{"q":"Oslo","limit":10}', "a"), made("search", '{ "limit": 10, "q": "Oslo" }', "a")), True),
        ((made("search", {"q": "Oslo"}, "a"), made("search", {"q": "Oslo", "limit": 10}, "a")), True),
        ((made("search", {"q": "Oslo"}, "a"), made("search", {"q": "Oslo", "limit": 5}, "a")), False),
        ((made("add", {"n": 1}, "a"), made("add", {"n": "1"}, "a")), False),
        ((made("add", {"n": 1}, "a"), made("sub", {"n": 1}, "a")), False),
        ((made("add", {"n": {"a": 1, "b": 2}}, "a"), made("add", {"n": {"b": 2, "a": 1}}, "a")), True),
        ((made("add", {"n": [1, 2]}, "a"), made("add", {"n": [2, 1]}, "a")), False),
        # Another call in between does not make it useful; another result does.
        ((HIT, made("read", {"n": 1}, "x"), HIT), True),
        ((made("next_page", "{}", "1"), made("next_page", "{}", "2"), made("next_page", "{}", "3")), False),
        ((made("state", "{}", "on"), made("state", "{}", "off"), made("state", "{}", "on")), False),
        # A failed call may be repeated once.
        ((FAILED, HIT), False),
        ((FAILED, FAILED), False),
        ((FAILED, FAILED, HIT), False),
        ((FAILED, FAILED, FAILED), True),
        # Without results, and with arguments that are no JSON.
        ((made("search", {"q": "Oslo"}), made("search", {"q": "Oslo"})), True),
        ((made("search", '{"q": "Os'), made("search", '{"q": "Os')), True),
        ((made("now", ""), made("now", None), made("now", "{}")), True),
        # No two texts of other languages are the same for their likeness.
        ((made("search", {"q": "奥斯陆"}, "a"), made("search", {"q": "奥斯路"}, "a")), False),
        ((made("search", {"q": "أوسلو"}, "a"), made("search", {"q": "اوسلو"}, "a")), False),
    ],
)
def test_redundant_call(steps: tuple[Any, ...], redundant: bool) -> None:
    found = result("redundant-call", *steps, tools=(SEARCH,))
    assert (found.value, found.passed) == (float(redundant), not redundant), found.reason


def test_tools_that_are_polled_may_be_named() -> None:
    poll = made("get_status", {"id": 7}, "pending")
    assert not result("redundant-call", poll, poll).passed
    assert result("redundant-call", poll, poll, value="get_status").passed
    assert not result("redundant-call", poll, poll, HIT, HIT, value=["get_status"]).passed
    assert result("step-efficiency", poll, poll, value="get_status").value == 1


def test_parallel_calls_and_ids_that_repeat_get_their_own_results() -> None:
    calls = [{"id": None, "function": {"name": "roll", "arguments": "{}"}} for _ in range(2)]
    both: tuple[ChatMessage, ...] = (
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": None, "name": "roll", "content": "3"},
        {"role": "tool", "tool_call_id": None, "name": "roll", "content": "5"},
    )
    assert result("redundant-call", both).passed
    assert not result("redundant-call", both, made("roll", "{}", "5")).passed
    unanswered = made("roll", "{}")
    assert result("redundant-call", unanswered, made("roll", "{}", "5")).passed


@pytest.mark.parametrize(
    ("steps", "options", "value"),
    [
        ((), {}, 0.5),
        ((HIT,), {}, 1.0),
        ((HIT, HIT), {}, 0.5),
        ((HIT,) * 5, {}, 0.2),
        ((FAILED, HIT), {}, 0.5),
        ((FAILED,) * 5, {}, 0.0),
        ((HIT, made("read", {"n": 1}, "x"), made("read", {"n": 2}, "y"), HIT), {}, 0.75),
        (tuple(made("read", {"n": n}, str(n)) for n in range(8)), {}, 1.0),
        (tuple(made("read", {"n": n}, str(n)) for n in range(8)), {"max": 4}, 0.5),
        (tuple(made("read", {"n": n}, str(n)) for n in range(3)), {"max": 4}, 1.0),
        ((HIT, made("read", "{}", "gone", status="error")), {}, 0.5),
        ((HIT, made("read", "{}", "no such\n file")), {"line": with_errors("tool read: no such file")}, 0.5),
        ((HIT, made("read", "{}")), {"line": with_errors("tool read: ValueError: x")}, 0.5),
        ((HIT, made("read", "{}", "It begins: Error: is only a word")), {}, 1.0),
    ],
)
def test_step_efficiency(steps: tuple[Any, ...], options: dict[str, Any], value: float) -> None:
    found = result("step-efficiency", *steps, **options)
    assert (found.value, found.passed) == (value, value >= 0.5), found.reason


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"q": "Oslo"}', ""),
        ({"q": "Oslo", "limit": 3}, ""),
        ('{"q": "天気はどうですか", "limit": 1}', ""),
        ('{"q": "ما حال الطقس؟ «timeout»"}', ""),
        ('{"q": "a \\"quoted\\" {brace} \\n"}', ""),
        ('{"q": "Os', "not JSON"),
        ('{"q": {"a": [1, 2}}', "not JSON"),
        ("{'q': 'Oslo'}", "not JSON"),
        ('{"q": "Oslo"} and more', "not JSON"),
        ('{"q": NaN}', "NaN is not valid"),
        ('["Oslo"]', "not an object"),
        ('"Oslo"', "not an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"q": 7}', 'not of type "string"'),
        ('{"q": "Oslo", "limit": "3"}', 'not of type "integer"'),
        ("{}", '"q" is a required property'),
        ("", '"q" is a required property'),
        (None, '"q" is a required property'),
    ],
)
def test_call_format(arguments: Any, problem: str) -> None:
    step = made("search", arguments, "x")
    good = result("call-format", step, tools=(SEARCH,))
    bad = result("call-format", step, tools=(SEARCH,), value="invalid")
    assert (good.value, bad.value) == ((0.0, 1.0) if problem else (1.0, 0.0)), good.reason
    assert good.passed is bad.passed is not problem
    assert problem in good.reason


def test_a_call_of_no_offered_tool_is_not_valid_if_any_tool_was_recorded() -> None:
    assert "browse: no such tool" in result("call-format", made("browse", "{}"), tools=(SEARCH,)).reason
    assert result("call-format", made("browse", "{}")).value == 1
    assert result("call-format", made("browse", "{")).value == 0


def test_the_share_of_calls_that_are_valid() -> None:
    steps = (HIT, HIT, HIT, made("search", '{"q": '))
    assert result("call-format", *steps, tools=(SEARCH,)).value == 0.75
    assert result("call-format", *steps, tools=(SEARCH,), value="invalid").value == 1
    assert result("call-format", tools=(SEARCH,)).value == 1
    assert result("call-format", tools=(SEARCH,), value="invalid").value == 0


def test_a_call_that_became_text_counts_as_a_call_and_one_in_code_does_not() -> None:
    text = 'Let me see. <tool_call>{"name": "search", "arguments": {"q": "Oslo"}}'
    assert result("call-format", answer=text).value == 0
    assert result("call-format", HIT, answer=text).value == 0.5
    assert result("call-format", ({"role": "assistant", "content": text},), HIT, value="invalid").value == 1
    assert result("call-format", answer="The model writes `<tool_call>` before a call.").value == 1


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "objekt"}, {"$ref": "http://127.0.0.1:9/schema.json"}, "text", None, {"$ref": "#"},
        {"properties": {"q": {"pattern": "("}}}, {},
    ],
)  # fmt: skip
def test_a_definition_that_cannot_be_applied_is_no_fault_of_the_call(parameters: Any) -> None:
    search = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    assert result("call-format", HIT, tools=(search,)).value == 1
    assert result("redundant-call", HIT, tools=(search,)).passed
    assert result("call-format", HIT, tools=({"name": "search", "parameters": {"required": ["x"]}},)).value == 0


@pytest.mark.parametrize(
    "error",
    [
        "tool search: TimeoutError: slow", "tool search: TimeoutError", "model: APITimeoutError: Request timed out.",
        "tool search: ReadTimeout: ", "tool run: subprocess.TimeoutExpired: Command 'x'",
        "tool x: Command timed out after 5ms",
        "tool search: httpx.ConnectTimeout('')", "model: 504 Gateway Time-out", "tool x: DEADLINE_EXCEEDED",
    ],
)  # fmt: skip
def test_timeout_in_an_error(error: str) -> None:
    found = result("timeout", HIT, line=with_errors(error))
    assert (found.value, found.passed) == (1.0, False)
    assert error.rstrip() in found.reason


@pytest.mark.parametrize(
    "step",
    [
        made("search", "{}", "TimeoutError: slow"),
        made("search", "{}", "The request timed out", status="error"),
        made(
            "execute_python_code", "{}",
            "<returncode>-1</returncode><stdout>123\n</stdout><stderr>TimeoutError: The code execution exceeded the"
            " timeout of 2 seconds.</stderr>",
        ),
    ],
)  # fmt: skip
def test_timeout_in_a_result(step: tuple[ChatMessage, ...]) -> None:
    assert not result("timeout", step).passed


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("To avoid a TimeoutError: raise the limit. The request timed out means …", ()),
        ("Le délai d'attente est dépassé (timeout).", ()),
        ("请求超时通常是网络问题。TimeoutError: 表示超时。", ()),
        ("انتهت مهلة الطلب", ()),
        ("x", ("tool search: ValueError: timeout must be above 0", "tool search: TypeError: unexpected 'timeout'")),
        ("<returncode>-1</returncode><stdout></stdout><stderr>killed</stderr>", ()),
        ("<returncode>0</returncode><stdout>TimeoutError: is a class</stdout><stderr></stderr>", ()),
    ],
)
def test_what_only_speaks_of_timeouts_is_none(text: str, errors: tuple[str, ...]) -> None:
    steps = ({"role": "assistant", "content": text},), made("search", {"q": text}, text)
    found = result("timeout", *steps, answer=text, line=with_errors(*errors))
    assert found.passed, found.reason


def test_a_reply_that_took_too_long() -> None:
    times = {"started_at": "2026-03-01T12:00:00+00:00", "ended_at": "2026-03-01T12:01:30+00:00"}
    assert not result("timeout", value=60, line=with_errors(**times)).passed
    assert result("timeout", value=90, line=with_errors(**times)).passed
    assert result("timeout", line=with_errors(**times)).passed
    assert result("timeout", value=60).passed
    assert result("timeout", value=60, line=with_errors(started_at="", ended_at="now")).passed


@pytest.mark.parametrize("kind", ["redundant-call", "step-efficiency", "call-format", "timeout"])
def test_odd_steps_break_no_check(kind: str) -> None:
    odd: tuple[dict[str, Any], ...] = (
        {"role": "assistant", "tool_calls": None}, {"role": "assistant", "tool_calls": [None, {"function": None}]},
        {"tool_calls": "x"}, {}, {"role": "tool"}, {"role": "tool", "tool_call_id": 3, "content": None},
        {"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": 7, "arguments": {1: 2, "a": 3}}}]},
    )  # fmt: skip
    result(
        kind,
        odd,
        odd,
        tools=({}, {"function": 3}, {"function": {"name": None}}),
        line={"metadata": {"errors_json": "{"}},
    )


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"type": "redundant-call"}, "would reward those: make it negative"),
        ({"type": "timeout", "value": 60}, "would reward those: make it negative"),
        ({"type": "call-format", "value": "invalid"}, "would reward those: make it negative"),
        ({"type": "call-format", "weight": -1}, "would punish those: make it positive"),
        ({"type": "step-efficiency", "weight": -1}, "would punish those: make it positive"),
        ({"type": "timeout", "weight": -1, "required": True}, "cannot have a negative weight"),
        ({"type": "timeout", "weight": -1, "value": 0}, "seconds above 0"),
        ({"type": "call-format", "value": "good"}, "must be `valid` or `invalid`"),
        ({"type": "redundant-call", "weight": -1, "value": []}, "names of tools"),
        ({"type": "redundant-call", "weight": -1, "max": 3}, "has no max"),
    ],
)
def test_a_wrong_use_is_explained(raw: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_rubric({"id": "r", "criteria": [{"id": "a", "value": "x"}, {"id": "b", **raw}]}, "r.yaml")
