"""Traces in other dialects than AgentScope's: calls and results are read, and what is not read is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply
from tests.sources.studio.reading import extracted
from tests.sources.studio.writer import agent, chat, message, part, span, tool

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": [{"text": "Stock of 77?"}]}
CALL = {"role": "assistant", "content": [{"toolUse": {"toolUseId": "c1", "name": "stock", "input": {"sku": 77}}}]}
ANSWER = {"role": "assistant", "content": [{"text": "There are 41."}]}


def bedrock(result: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": [{"toolResult": {"toolUseId": "c1", "content": result}}]}


def told(path: Path, *spans: dict[str, Any]) -> Reply:
    return extracted(path, *spans, agent("a", "Stock of 77?", "There are 41.", ended=9))["a"]


def test_a_call_of_bedrock_has_its_arguments_and_its_result(tmp_path: Path) -> None:
    later = [SYSTEM, USER, CALL, bedrock([{"text": "41 pieces"}])]
    reply = told(
        tmp_path,
        chat("m0", [SYSTEM, USER], [CALL], parent="a", began=1, ended=2),
        chat("m1", later, [ANSWER], parent="a", began=3, ended=4),
    )
    assert reply.history == (SYSTEM,)
    call, result = reply.trajectory
    assert call["tool_calls"][0]["function"] == {"name": "stock", "arguments": '{"sku": 77}'}
    assert (result["role"], result["content"]) == ("tool", "41 pieces")
    assert reply.prompt_reason == ""


@pytest.mark.parametrize("place", [0, 1])
def test_a_part_of_the_prompt_that_was_not_read_is_said_with_its_message(tmp_path: Path, place: int) -> None:
    sent = [message("system", part("s")), message("user", part("Stock of 77?"))]
    sent[place]["parts"].append({"type": "hologram", "of": "x"})
    reply = told(
        tmp_path, chat("m0", sent, [message("assistant", part("There are 41."))], parent="a", began=1, ended=2)
    )
    assert reply.prompt_reason == f"a part of type hologram at messages[{place}] was not read"
    assert (reply.query, reply.answer) == ("Stock of 77?", "There are 41.")


@pytest.mark.parametrize(
    ("output", "answers", "missing"),
    [
        ({"odd": 1}, [], "the output of the agent's span holds no message"),
        (None, [], "neither the agent's span nor its model calls have an output"),
        (None, [message("assistant")], "its last model call answered nothing"),
        (
            None,
            [message("assistant", {"type": "tool_call", "id": "c1", "name": "f"})],
            "its last model call asked for f",
        ),
    ],
)
def test_what_is_missing_of_an_answer_is_said(
    tmp_path: Path, output: Any, answers: list[dict[str, Any]], missing: str
) -> None:
    own = span("a", "invoke_agent", {"gen_ai": {"output": {"messages": output}} if output else {}}, ended=9)
    reply = extracted(tmp_path, chat("m", [USER], answers, parent="a", began=1, ended=2), own)["a"]
    assert reply.skip is SkipReason.NO_ANSWER
    assert reply.skip_detail.startswith(missing)


PAGE = {"type": "web_search_result", "title": "Stock", "url": "https://x/77", "encrypted_content": "AAA"}


def test_what_was_not_read_of_a_result_is_said(tmp_path: Path) -> None:
    called = message("assistant", {"type": "tool_call", "id": "c1", "name": "search", "arguments": {}})
    sent = [message("user", part("Stock of 77?"))]
    reply = told(
        tmp_path,
        chat("m0", sent, [called], parent="a", began=1, ended=2),
        tool("t", "c1", "search", [PAGE], parent="a", began=2, ended=3),
    )
    assert reply.trajectory[-1]["content"] == "Stock\nhttps://x/77"
    assert reply.prompt_reason == "a part of type web_search_result in a result of search was not read"


@pytest.mark.parametrize(
    "result",
    [
        {"content": [{"type": "text", "text": "no such SKU"}], "isError": True},
        {"content": [{"text": "no such SKU"}], "status": "error", "toolUseId": "c1"},
    ],
)
def test_a_result_that_says_that_it_is_an_error_is_one(tmp_path: Path, result: dict[str, Any]) -> None:
    called = message("assistant", {"type": "tool_call", "id": "c1", "name": "stock", "arguments": {}})
    reply = told(
        tmp_path,
        chat("m0", [message("user", part("Stock of 77?"))], [called], parent="a", began=1, ended=2),
        tool("t", "c1", "stock", result, parent="a", began=2, ended=3),
    )
    assert reply.errors == ("tool stock: no such SKU",)
    assert reply.trajectory[-1]["content"] == "no such SKU"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "41 pieces", "isError": False}, "41 pieces"),
        ({"content": [{"type": "text", "text": "41 pieces"}], "trace": 1}, "41 pieces"),
        ({"content": "41 pieces", "total": 3}, '{"content": "41 pieces", "total": 3}'),
        ({"content": {"pieces": 41}, "total": 3}, '{"content": {"pieces": 41}, "total": 3}'),
    ],
)
def test_an_object_of_the_tools_own_stays_whole(tmp_path: Path, result: dict[str, Any], text: str) -> None:
    called = message("assistant", {"type": "tool_call", "id": "c1", "name": "stock", "arguments": {}})
    reply = told(
        tmp_path,
        chat("m0", [message("user", part("Stock of 77?"))], [called], parent="a", began=1, ended=2),
        tool("t", "c1", "stock", result, parent="a", began=2, ended=3),
    )
    assert reply.trajectory[-1]["content"] == text


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        lambda fails: message(
            "user",
            {"toolResult": {"toolUseId": "c1", "content": [{"text": "no SKU"}], "status": ["ok", "error"][fails]}},
        ),
        lambda fails: message(
            "user", {"type": "tool_result", "tool_use_id": "c1", "content": "no SKU", "is_error": fails}
        ),
        lambda fails: {
            "role": "tool", "tool_call_id": "c1", "content": "no SKU", "status": ["success", "error"][fails]
        },
        lambda fails: message(
            "tool",
            {
                "type": "tool-result", "toolCallId": "c1", "toolName": "stock",
                "output": {"type": ["text", "error-text"][fails], "value": "no SKU"},
            },
        ),
    ],
    ids=["Bedrock", "Anthropic", "LangChain", "Vercel"],
)  # fmt: skip
def test_an_error_is_known_from_the_next_request_where_the_tool_has_no_span(
    tmp_path: Path, given: Any, fails: bool
) -> None:
    asked = message("user", part("Stock of 77?"))
    called = message("assistant", {"type": "tool_call", "id": "c1", "name": "stock", "arguments": {}})
    reply = told(
        tmp_path,
        chat("m0", [asked], [called], parent="a", began=1, ended=2),
        chat("m1", [asked, called, given(fails)], [ANSWER], parent="a", began=3, ended=4),
    )
    assert reply.trajectory[-1]["content"] == "no SKU"
    assert reply.errors == (("tool stock: no SKU",) if fails else ())


def test_an_envelope_and_messages_of_langchain_are_read_in_a_studio_database_as_well(tmp_path: Path) -> None:
    sent = {
        "version": "0.1.0",
        "messages": [
            SYSTEM,
            {
                "lc": 1,
                "type": "constructor",
                "id": ["langchain", "HumanMessage"],
                "kwargs": {"content": "Stock of 77?"},
            },
        ],
    }
    reply = told(tmp_path, chat("m0", sent, [ANSWER], parent="a", began=1, ended=2))  # type: ignore[arg-type]
    assert (reply.history, reply.query, reply.prompt_reason) == ((SYSTEM,), "Stock of 77?", "")
