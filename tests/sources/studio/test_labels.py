"""Every reply of the labelled fixtures comes out exactly once, text for text."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest

from flywheel.config.ingest import IngestSettings
from flywheel.records.trace import Reply, SpanStatus
from flywheel.sources.studio.reader import StudioReader
from tests.cases import for_each
from tests.sources.studio.reading import NOW, Ledger, by_id, read_all
from tests.sources.studio.writer import DATA, GENERATION, NAMES, expected_skip, labels

CASES = [
    pytest.param(name, label, id=f"{name}-{label['n']}-{label['kind']}") for name in NAMES for label in labels(name)
]


@cache
def replies(name: str) -> dict[str, Reply]:
    told, dead, _ = read_all(DATA / f"{name}.sqlite")
    assert dead == []
    return by_id(told)


def reply_of(name: str, label: dict[str, Any]) -> Reply:
    return replies(name)[label["span_id"] or label["unfinished_span_id"]]


def called(reply: Reply) -> list[str]:
    return [call["function"]["name"] for message in reply.trajectory for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("name", NAMES)
def test_each_label_is_one_reply_and_nothing_else_is(name: str) -> None:
    wanted = [label["span_id"] or label["unfinished_span_id"] for label in labels(name)]
    assert sorted(wanted) == sorted(replies(name))


@for_each(("name", "label"), CASES)
def test_reply(name: str, label: dict[str, Any]) -> None:
    reply = reply_of(name, label)
    assert reply.query == (label.get("user_query") or label["query"])
    assert reply.request == label["query"]
    assert reply.answer == (label["answer"] if label["answer_in_span"] else "")
    assert reply.conversation_id == label["conversation_id_in_db"]
    assert reply.trace_id == label["trace_id"]
    assert reply.agent == (label["agent"] if label["span_in_db"] else reply.agent)
    assert reply.turn == label["turn"]
    assert called(reply) == label["tools"]
    assert reply.structured == label.get("structured")
    assert list(reply.images) == ([label["image"]] if label.get("image") else [])
    assert reply.skip is expected_skip(label)


@for_each(("name", "label"), [case for case in CASES if case.values[1]["status"] == "ERROR"])
def test_an_error_says_why(name: str, label: dict[str, Any]) -> None:
    reply = reply_of(name, label)
    assert reply.status is SpanStatus.ERROR
    kind, _, cause = label["error"].partition(": ")
    assert reply.skip_detail.startswith(kind)
    assert " ".join(cause.split())[:40] in reply.skip_detail


@pytest.mark.parametrize("name", NAMES)
def test_history_is_the_agents_own_earlier_turns(name: str) -> None:
    dialogues: dict[str, list[dict[str, Any]]] = {}
    compared = 0
    for label in labels(name):
        earlier = dialogues.setdefault(f"{label['run_name']} {label['dialogue']} {label['agent']}", [])
        reply = reply_of(name, label)
        if label["role"] == "root" and label["span_in_db"]:
            assert reply.history[0]["role"] == "system"
            assert "solving math problems" in reply.history[0]["content"]
            said = [(m["role"], m["content"]) for m in reply.history[1:]]
            if label["kind"] != "list_of_msgs" and label["turn"]:
                # An earlier answer that was empty may have been left out by the client's formatter.
                wanted = [
                    (role, text)
                    for turn in earlier
                    for role, text in (("user", turn["query"]), ("assistant", turn["answer"]))
                ]
                assert [m for m in said if m[1].strip()] == [m for m in wanted if m[1].strip()]
                compared += 1
        earlier.append(label)
    assert compared > 20


@pytest.mark.parametrize("name", NAMES)
def test_what_a_pipeline_hands_on_is_request_and_not_history(name: str) -> None:
    last = [reply_of(name, label) for label in labels(name) if label["role"] == "pipeline_last"]
    assert [[message["role"] for message in reply.history] for reply in last] == [["system"], ["system"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_list_of_messages_is_history_and_request(name: str) -> None:
    (label,) = (label for label in labels(name) if label["kind"] == "list_of_msgs")
    reply = reply_of(name, label)
    assert [m["content"] for m in reply.history[1:]] == label["query_parts"][:-1]
    assert reply.query == label["query_parts"][-1]


@pytest.mark.parametrize("name", NAMES)
def test_tool_steps_are_calls_with_their_results(name: str) -> None:
    for label in labels(name):
        if not label["tools"]:
            continue
        reply = reply_of(name, label)
        ids = [call["id"] for message in reply.trajectory for call in message.get("tool_calls", ())]
        results = {message["tool_call_id"]: message for message in reply.trajectory if message["role"] == "tool"}
        assert list(results) == ids, "each call has its result, in order"
        assert all(message["content"] for message in results.values())
        offered = {tool["function"]["name"] for tool in reply.tools}
        assert set(label["tools"]) - {"no_such_tool"} <= offered
        assert not offered & {"generate_response", "GenerateStructuredOutput"}
        assert all(tool["function"]["parameters"] for tool in reply.tools)


@pytest.mark.parametrize("name", NAMES)
def test_models_tokens_times_and_service(name: str) -> None:
    for label in labels(name):
        reply = reply_of(name, label)
        if reply.skip is None:
            assert reply.model == "gpt-4o-mini"
            assert reply.adapter == ""
            # A client that never saw the end of an empty stream reports no usage.
            assert reply.input_tokens > 0 or not reply.answer
        assert reply.started_at <= reply.ended_at
        assert reply.started_at.tzinfo is UTC
        assert datetime(2026, 11, 21, 5, tzinfo=UTC) < reply.started_at < NOW
        assert reply.service == {"new_v2": "math-tutor", "old": "", "migrated": ""}.get(
            name, "unknown_service:python"
        )


def test_both_schemas_give_the_same_replies_of_migrated_data() -> None:
    old, migrated = replies("old"), replies("migrated")
    assert {key: reply for key, reply in old.items() if reply != migrated[key]} == {}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_user_saw_answered_is_a_task(name: str) -> None:
    """Empty, blank and refusing answers too: they are judged, not skipped."""
    for label in labels(name):
        seen = label["user_visible"] and label["answer_in_span"] and label["kind"] != "interrupted"
        assert (reply_of(name, label).skip is None) == seen


@pytest.mark.parametrize("name", NAMES)
def test_counts(name: str) -> None:
    told, _, _ = read_all(DATA / f"{name}.sqlite")
    skipped = Counter(reply.skip for reply in told)
    assert len(told) == 105
    assert skipped == Counter(expected_skip(label) for label in labels(name))
    assert skipped[None] == {"new_v1": 97, "new_v2": 97}.get(name, 96)


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_says_what_it_reads(ledger: Ledger, name: str) -> None:
    reader = StudioReader(DATA / f"{name}.sqlite", IngestSettings())
    assert reader.schema is None
    steps = ledger.pass_(reader)
    found = (DATA / f"{name}.sqlite").stat()
    assert reader.schema is not None and reader.schema.name == GENERATION[name]
    assert steps[-1].cursor is not None
    assert steps[-1].cursor.identity == f"{found.st_dev}:{found.st_ino}"
    assert steps[-1].cursor.fingerprint
    assert steps[-1].cursor.rowid == reader.database.last_rowid() == sum(step.rows for step in steps)
    assert reader.database.longest_read_ms > 0
    reader.close()
