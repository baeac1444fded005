"""Dialogues that other clients recorded come out text for text, or say why not."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from flywheel.records.trace import Reply
from tests.sources.studio.reading import MUCH_LATER, by_id, read_all
from tests.sources.studio.writer import DATA

CLIENTS = ("client_1_0_6", "client_1_0_18", "client_2_0_4", "client_2_0_9")


def truth(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "dialogues" / f"{name}.jsonl").read_text().split("\n") if line]


CASES = [
    pytest.param(name, told, id=f"{name}-{place}-{told['kind']}")
    for name in CLIENTS
    for place, told in enumerate(truth(name))
]


@cache
def replies(name: str) -> dict[str, Reply]:
    told, dead, _ = read_all(DATA / "dialogues" / f"{name}.sqlite", now=MUCH_LATER)
    assert dead == []
    return by_id(told)


def said(messages: tuple[dict[str, Any], ...]) -> list[list[str]]:
    return [[m["role"], m["content"]] for m in messages if m["content"] or m["role"] == "tool"]


def steps(reply: Reply) -> list[list[Any]]:
    """Each call with its arguments and its result."""
    results = {step["tool_call_id"]: step["content"] for step in reply.trajectory if step["role"] == "tool"}
    calls = [call for step in reply.trajectory for call in step.get("tool_calls", ())]
    return [[c["function"]["name"], json.loads(c["function"]["arguments"]), results.get(c["id"])] for c in calls]


@pytest.mark.parametrize("name", CLIENTS)
def test_every_reply_is_extracted_once(name: str) -> None:
    assert sorted(told["span_id"] for told in truth(name)) == sorted(replies(name))


@pytest.mark.parametrize(("name", "told"), CASES)
def test_reply(name: str, told: dict[str, Any]) -> None:
    reply = replies(name)[told["span_id"]]
    assert reply.agent == told["agent"]
    assert reply.conversation_id == told["conversation_id"]
    assert (reply.skip and reply.skip.value) == told["skip"], reply.skip_detail
    if "query" in told:
        assert reply.query == told["query"]
    if "answer" in told:
        assert reply.answer == told["answer"]
    if "history" in told:
        assert said(reply.history) == told["history"]
    whole = json.dumps([reply.history, reply.trajectory], ensure_ascii=False)
    for text in told.get("has", ()):
        assert text in json.dumps(reply.history, ensure_ascii=False)
    for text in told.get("lacks", ()):
        assert text not in whole
    if "tools" in told:
        for (name_, arguments, result), wanted in zip(steps(reply), told["tools"], strict=True):
            assert [name_, arguments] == wanted[:2]
            assert wanted[2] is None or result == wanted[2]
    if "tokens" in told:
        assert [reply.input_tokens, reply.output_tokens] == told["tokens"]
    assert list(reply.errors) == told.get("errors", [])
