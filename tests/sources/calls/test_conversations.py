"""Which recorded call continues which: conversations are found again however they were interleaved."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace
from sqlalchemy import select

from flywheel.records.request_id import mark_of
from flywheel.records.states import SkipReason
from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.sources.call_puller import CallLogCopy
from flywheel.sources.calls.conversations import extending, outline
from flywheel.sources.calls.parsing import parse
from flywheel.store import placed_calls
from flywheel.store.kernel.schema import call_hashes
from tests.cases import for_each
from tests.factories.foreign_call import PATHS, VALUES
from tests.sources.calls.placing import Conversations, Reply
from tests.sources.calls.recorded import (
    BEGIN_NS,
    SECOND_NS,
    assistant,
    chat,
    completion,
    recorded,
    sse,
    tool,
    tool_call,
    user,
)

SYSTEM = {"role": "system", "content": "Be brief."}
IDLE = 3600.0
LATER_NS = BEGIN_NS + 10**6 * SECOND_NS


def at(seconds: float) -> int:
    return BEGIN_NS + int(seconds * SECOND_NS)


class Found:
    """The replies that were found in some calls."""

    def __init__(self, replies: list[Reply]) -> None:
        self.replies = {call.request_id: reply for reply in replies for call in reply.calls}

    def of(self, call: RecordedCall) -> Reply:
        return self.replies[call.request_id]

    def calls(self, call: RecordedCall) -> list[str]:
        return [each.request_id for each in self.of(call).calls]


def handed_on(conversations: Conversations, now_ns: int = LATER_NS) -> list[Reply]:
    found: list[Reply] = []
    while due := conversations.due(now_ns):
        found += due
        conversations.hand_on(due)
    return found


def found(folder: Path, *calls: RecordedCall, idle: float = IDLE) -> Found:
    """The replies in these calls, which the log has in the order in which they ended."""
    with CallLog(folder / "calls.db") as log:
        log.append(sorted(calls, key=lambda call: call.ended_ns))
        conversations = Conversations(log, idle_ns=int(idle * SECOND_NS))
        while conversations.place(LATER_NS):
            pass
        return Found(handed_on(conversations))


def conversation_of(call: RecordedCall) -> str:
    mark = mark_of(call.request_id)
    assert mark is not None
    return f"calls-{mark.random}"


def asked(messages: list[dict[str, Any]], answer: dict[str, Any], began: float, **others: Any) -> RecordedCall:
    return recorded(chat(messages, **others.pop("request", {})), completion(answer), began=began, **others)


def test_turns_with_tools_are_one_conversation_with_one_reply_for_each_question(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [SYSTEM, user("1+2?")]
    first = asked(messages, assistant(None, tool_call("add", '{"a": 1, "b": 2}')), 0)
    messages += [assistant("", tool_call("add", '{"b":2,"a":1}')), tool("3")]
    second = asked(messages, assistant("It is 3.\n"), 10)
    messages += [assistant("It is 3."), user("Thanks!")]
    third = asked(messages, assistant("Welcome."), 20)
    replies = found(tmp_path, first, second, third)
    assert replies.calls(first) == replies.calls(second) == [first.request_id, second.request_id]
    assert replies.calls(third) == [third.request_id]
    for call in (first, second, third):
        reply = replies.of(call)
        assert (reply.conversation, reply.root) == (conversation_of(first), conversation_of(first))
        assert (reply.skip, reply.detail, reply.is_answered) == (None, "", True)


REPEATED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (assistant("Hi"), [assistant(None) | {"content": [{"type": "text", "text": "Hi"}]}]),
    (assistant("Hi\n"), [assistant("Hi")]),
    ({**assistant("Hi"), "reasoning": "Hm."}, [assistant("Hi")]),
    (assistant("Hi"), [{**assistant("Hi"), "reasoning_content": "Hm.", "name": "Friday"}]),
    (
        assistant("a\nb"),
        [assistant(None) | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ),
    (
        assistant("Hi"),
        [assistant(None) | {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hi"}]}],
    ),
    (assistant("Hi", tool_call("f", '{"a": [1, 2]}')), [assistant("Hi", tool_call("f", '{"a":[1,2]}', "other-id"))]),
    (assistant("Hi", tool_call("f", "")), [assistant("Hi", tool_call("f", "{}"))]),
    (assistant("Hi", tool_call("f", "{no JSON")), [assistant("Hi", tool_call("f", "{no JSON"))]),
    (assistant("Hi", tool_call("f")), [assistant("Hi"), assistant(None, tool_call("f"))]),
    (assistant("a", tool_call("f"), tool_call("g")), [assistant("a", tool_call("f")), assistant("", tool_call("g"))]),
    (assistant(None), [assistant("")]),
    ({**assistant(None), "refusal": "No."}, [{**assistant(None), "refusal": "No."}]),
    ({**assistant(None), "refusal": "No."}, [assistant("No.")]),
    ({**assistant(None), "refusal": "No."}, [assistant(None) | {"content": [{"type": "refusal", "refusal": "No."}]}]),
]  # fmt: skip


@for_each(("answer", "repeated"), REPEATED)
def test_how_a_client_repeats_an_answer_makes_no_difference(
    tmp_path_factory: pytest.TempPathFactory, answer: dict[str, Any], repeated: list[dict[str, Any]]
) -> None:
    first = asked([user("hello")], answer, 0)
    second = asked([user([{"type": "text", "text": "hello"}]), *repeated, tool("1"), user("on")], assistant("b"), 10)
    replies = found(tmp_path_factory.mktemp("calls"), first, second)
    assert replies.of(second).conversation == conversation_of(first)


DIFFERENT: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (assistant("Hi"), [assistant("Hi there")]),
    (assistant("Hi"), [user("Hi")]),
    (assistant("Hi", tool_call("f", '{"a":1}')), [assistant("Hi", tool_call("f", '{"a":2}', "other"))]),
    (assistant("Hi", tool_call("f")), [assistant("Hi", tool_call("g", "{}", "other"))]),
    (assistant("Hi", tool_call("f")), [assistant("Hi")]),
]


@for_each(("answer", "repeated"), DIFFERENT)
def test_another_answer_is_another_conversation(
    tmp_path_factory: pytest.TempPathFactory, answer: dict[str, Any], repeated: list[dict[str, Any]]
) -> None:
    first = asked([user("hello")], answer, 0)
    second = asked([user("hello"), *repeated, user("on")], assistant("b"), 10)
    replies = found(tmp_path_factory.mktemp("calls"), first, second)
    assert replies.of(second).conversation == replies.of(second).root == conversation_of(second)


@for_each("others", [{"credential": "c2"}, {"request": {"user": "ann"}}])
def test_credentials_and_users_do_not_mix(tmp_path_factory: pytest.TempPathFactory, others: dict[str, Any]) -> None:
    first = asked([user("hello")], assistant("Hi", tool_call("f")), 0)
    again = [user("hello"), assistant("Hi", tool_call("f")), tool("1")]
    second = asked(again, assistant("b"), 10, **others)
    third = asked(again, assistant("c"), 20)
    replies = found(tmp_path_factory.mktemp("calls"), first, second, third)
    assert replies.of(second).root == conversation_of(second)
    assert replies.of(third).conversation == conversation_of(first)


def test_a_second_continuation_is_a_fork_in_the_split_of_its_root(tmp_path: Path) -> None:
    messages = [user("hello"), assistant("Hi"), user("on")]
    first = asked(messages[:1], assistant("Hi"), 0)
    second = asked(messages, assistant("b"), 10)
    fork = asked(messages, assistant("c"), 20)
    of_fork = asked([*messages, assistant("c"), user("and on")], assistant("d"), 30)
    fork_of_fork = asked([*messages, assistant("c"), user("or else")], assistant("e"), 40)
    main = asked([*messages, assistant("b"), user("and on")], assistant("f"), 50)
    replies = found(tmp_path, first, second, fork, of_fork, fork_of_fork, main)
    assert {replies.of(call).root for call in (first, second, fork, of_fork, fork_of_fork, main)} == {
        conversation_of(first)
    }
    own = [replies.of(call).conversation for call in (first, second, fork, of_fork, fork_of_fork, main)]
    assert own == [
        conversation_of(call) for call in (first, first, fork, fork, fork_of_fork, first)
    ]  # fmt: skip


def test_of_calls_with_the_same_answer_the_newest_without_a_continuation_goes_on(tmp_path: Path) -> None:
    first = asked([user("hello")], assistant("Hi"), 0)
    second = asked([user("hello")], assistant("Hi"), 5)
    messages = [user("hello"), assistant("Hi"), user("on")]
    of_second = asked(messages, assistant("b"), 10)
    of_first = asked(messages, assistant("c"), 20)
    fork = asked(messages, assistant("d"), 30)
    replies = found(tmp_path, first, second, of_second, of_first, fork)
    assert replies.of(of_second).conversation == conversation_of(second)
    assert replies.of(of_first).conversation == conversation_of(first)
    assert replies.of(fork).conversation == conversation_of(fork)
    assert replies.of(fork).root == conversation_of(second)


def test_a_conversation_that_was_idle_too_long_is_not_continued(tmp_path: Path) -> None:
    first = asked([user("hello")], assistant("Hi"), 0)
    second = asked([user("hello"), assistant("Hi"), user("on")], assistant("b"), 3602)
    assert found(tmp_path, first, second).of(second).conversation == conversation_of(second)


def test_a_call_cannot_continue_one_that_ends_after_it_began(tmp_path: Path) -> None:
    first = asked([user("hello")], assistant("Hi"), 0, seconds=20)
    second = asked([user("hello"), assistant("Hi"), user("on")], assistant("b"), 10)
    assert found(tmp_path, first, second).of(second).conversation == conversation_of(second)


def test_a_client_may_go_on_before_the_last_byte_was_sent(tmp_path: Path) -> None:
    first = asked([user("hello")], assistant("Hi"), 0, seconds=10.2)
    second = asked([user("hello"), assistant("Hi"), user("on")], assistant("b"), 10)
    assert found(tmp_path, first, second).of(second).conversation == conversation_of(first)


def test_a_compressed_context_is_in_the_split_of_the_tool_calls_that_it_repeats(tmp_path: Path) -> None:
    add = tool_call("add", "{}", "call-a")
    first = asked([SYSTEM, user("a long story")], assistant(None, add), 0)
    second = asked([SYSTEM, user("a long story"), assistant(None, add), tool("1", "call-a")], assistant("b"), 10)
    compressed = [SYSTEM, user("In short: a story."), assistant(None, add), tool("1", "call-a"), user("on")]
    third = asked(compressed, assistant("c"), 20)
    other = asked(compressed, assistant("d"), 30, credential="c2")
    summary = asked([SYSTEM, user("In short: a story."), user("on")], assistant("e"), 40)
    replies = found(tmp_path, first, second, third, other, summary)
    assert replies.of(third).conversation == conversation_of(third)
    assert replies.of(third).root == conversation_of(first)
    assert replies.of(other).root == conversation_of(other)
    assert replies.of(summary).root == conversation_of(summary)


REMINDER = user([{"type": "text", "text": "<system-reminder>\nIt is late.\n</system-reminder>"}])


def test_a_reminder_is_no_question(tmp_path: Path) -> None:
    messages = [SYSTEM, user("1+2?"), REMINDER]
    first = asked(messages, assistant(None, tool_call("add")), 0)
    messages = [*messages, assistant(None, tool_call("add")), tool("3"), REMINDER]
    second = asked(messages, assistant("3"), 10)
    third = asked([*messages, assistant("3"), user("Thanks!"), REMINDER], assistant("Welcome."), 20)
    replies = found(tmp_path, first, second, third)
    assert replies.calls(first) == [first.request_id, second.request_id]
    assert replies.calls(third) == [third.request_id]


def test_a_question_closes_a_reply_that_was_not_answered(tmp_path: Path) -> None:
    messages = [user("1+2?"), assistant(None, tool_call("add")), tool("3")]
    first = asked(messages[:1], assistant(None, tool_call("add")), 0)
    second = asked([*messages, user("Stop. What is 4+5?")], assistant("9"), 10)
    replies = found(tmp_path, first, second)
    assert replies.of(first).skip is SkipReason.UNFINISHED
    assert "add" in replies.of(first).detail
    assert (replies.of(second).skip, replies.calls(second)) == (None, [second.request_id])
    assert replies.of(second).conversation == conversation_of(first)


def test_an_agent_may_finish_by_a_function(tmp_path: Path) -> None:
    finish = tool_call("generate_response", '{"response": "3"}')
    first = asked([user("1+2?")], assistant(None, finish), 0)
    second = asked([user("1+2?"), assistant(None, finish), tool("Done."), user("Thanks!")], assistant("Welcome."), 10)
    replies = found(tmp_path, first, second)
    assert (replies.of(first).skip, replies.of(first).is_answered) == (None, True)
    assert replies.calls(second) == [second.request_id]


def test_an_answer_that_is_continued_without_a_question_is_the_same_reply(tmp_path: Path) -> None:
    first = asked([user("1+2?")], assistant("Let me see."), 0)
    second = asked([user("1+2?"), assistant("Let me see."), REMINDER], assistant("3"), 10)
    replies = found(tmp_path, first, second)
    assert replies.calls(first) == [first.request_id, second.request_id]


def test_a_retry_of_the_client_continues_what_the_failed_call_would_have(tmp_path: Path) -> None:
    messages = [user("hello"), assistant("Hi", tool_call("f")), tool("1")]
    first = asked(messages[:1], assistant("Hi", tool_call("f")), 0)
    cut = recorded(chat(messages), sse({"choices": []}, done=False), began=10, is_complete=False)
    failed = recorded(chat(messages), {"error": {"message": "overloaded"}}, began=20, status=503)
    empty = recorded(chat(messages), completion(), began=25)
    again = asked(messages, assistant("b"), 30, retry=2)
    replies = found(tmp_path, first, cut, failed, empty, again)
    assert replies.calls(again) == [first.request_id, again.request_id]
    assert [replies.of(call).skip for call in (first, cut, failed, empty)] == [
        None,
        SkipReason.INTERRUPTED,
        SkipReason.ERROR,
        SkipReason.ERROR,
    ]
    assert replies.of(failed).detail == "overloaded"
    assert {replies.of(call).conversation for call in (cut, failed, empty, again)} == {conversation_of(first)}


def test_calls_without_a_conversation_are_skipped_with_the_reason(tmp_path: Path) -> None:
    raw = recorded({"prompt": "The capital"}, {"choices": [{"text": " is"}]}, path="/v1/completions")
    body = {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": "b"}]}]}
    request = {"input": "on", "previous_response_id": "resp_1"}
    after = recorded(request, body, path="/v1/responses", began=1)
    replies = found(tmp_path, raw, after)
    assert [replies.of(call).skip for call in (raw, after)] == [SkipReason.NO_QUERY] * 2
    assert "prompt" in replies.of(raw).detail
    assert "response" in replies.of(after).detail


def test_a_reply_is_handed_on_when_it_is_answered_and_again_when_it_goes_on(tmp_path: Path) -> None:
    tools = assistant(None, tool_call("f"))
    calls = [
        asked([user("hello")], tools, 0),
        asked([user("hello"), tools, tool("1")], assistant("Hi"), 10),
        asked([user("hello"), tools, tool("1"), assistant("Hi"), REMINDER], assistant("Ho"), 20),
    ]
    with CallLog(tmp_path / "calls.db") as log:
        log.append(calls[:1])
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS), wait_ns=5 * SECOND_NS)
        assert conversations.place(at(0.5)) == 0
        assert conversations.place(at(2)) == 1
        assert handed_on(conversations, at(100)) == []
        log.append(calls[1:2])
        assert conversations.place(at(12)) == 1
        assert handed_on(conversations, at(15)) == []
        (reply,) = conversations.due(at(16))
        assert [call.request_id for call in reply.calls] == [call.request_id for call in calls[:2]]
        assert conversations.due(at(16)) == [reply]
        conversations.hand_on([reply])
        assert conversations.due(LATER_NS) == []
        log.append(calls[2:])
        conversations.place(at(22))
        (longer,) = handed_on(conversations)
        assert (longer.id, len(longer.calls)) == (reply.id, 3)


def test_a_reply_that_goes_on_waits_for_its_last_call_alone(tmp_path: Path) -> None:
    nudge = [user("hello"), assistant("Let me see."), REMINDER]
    calls = [
        asked([user("hello")], assistant("Let me see."), 0),
        asked(nudge, assistant(None, tool_call("f")), 2),
    ]
    with CallLog(tmp_path / "calls.db") as log:
        log.append(calls)
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS), wait_ns=5 * SECOND_NS)
        assert conversations.place(LATER_NS) == 2
        assert handed_on(conversations, at(100)) == []
        (reply,) = handed_on(conversations, at(IDLE + 3))
        assert (reply.skip, len(reply.calls)) == (SkipReason.UNFINISHED, 2)


def test_a_reply_without_an_answer_is_handed_on_as_unfinished_when_it_was_idle(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        log.append([asked([user("hello")], assistant(None, tool_call("f")), 0)])
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
        conversations.place(LATER_NS)
        conversations.prune(time.time_ns() + SECOND_NS)
        assert handed_on(conversations, at(IDLE)) == []
        (reply,) = handed_on(conversations, at(IDLE + 1))
        assert reply.skip is SkipReason.UNFINISHED


def test_what_cannot_be_continued_is_forgotten(tmp_path: Path) -> None:
    def rows(log: CallLog) -> list[int]:
        """Answers and ids of tools by which a call is continued, replies, and calls that wait."""
        hashed = placed_calls._keyed(conversations.connection)
        hashes = {row.hash for row in conversations.connection.execute(select(call_hashes))}
        outlines = [outline(parse(log.find([each])[each])) for each in ids]
        ends, tools = ({hashed(each) for own in outlines for each in getattr(own, name)} for name in names)
        replies = conversations.rows(select(placed_calls.placed_calls.c.trace_id).distinct())
        return [len(hashes & ends), len(hashes & tools), len(replies), conversations.place(0)]

    names = ("ends", "own_tool_ids")
    ids: list[str] = []

    with CallLog(tmp_path / "calls.db") as log:
        log.append([hello := asked([user("hello")], assistant("Hi", tool_call("generate_response")), 0)])
        ids.append(hello.request_id)
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
        conversations.place(LATER_NS)
        conversations.prune(time.time_ns() + SECOND_NS)
        assert rows(log) == [0, 0, 1, 0], "what was not handed on is kept"
        log.append([late := asked([user("late")], assistant("Hi", tool_call("generate_response")), 100)])
        ids.append(late.request_id)
        conversations.place(LATER_NS)
        handed_on(conversations)
        conversations.prune(time.time_ns() - 3600 * SECOND_NS)
        assert rows(log) == [1, 1, 2, 0]
        conversations.prune(time.time_ns() + SECOND_NS)
        assert rows(log) == [0, 0, 0, 0]


def test_calls_that_were_pruned_before_they_were_placed_are_left_out(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        log.append([asked([user("hello")], assistant("Hi"), 0)])
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
        assert conversations.place(0) == 0
        log.prune(LATER_NS, 10**12)
        conversations.place(LATER_NS)
        assert handed_on(conversations) == []


def test_placing_goes_on_in_a_new_file_when_the_file_was_removed(tmp_path: Path) -> None:
    with CallLog(tmp_path / "calls.db") as log:
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
        first, second = (asked([user(text)], assistant("Hi"), 0) for text in ("hello", "hi"))
        log.append([first])
        assert conversations.place(LATER_NS) == 1
        for path in tmp_path.iterdir():
            path.unlink()
        assert conversations.place(LATER_NS) == 0
        log.append([first, second])
        assert conversations.place(LATER_NS) == 2
        assert {reply.id for reply in handed_on(conversations)} == {first.request_id, second.request_id}


def test_lone_surrogates_are_stored(tmp_path: Path) -> None:
    request = {"model": "\ud83d", "user": "\ud83d", "messages": [user("\ud83d")]}
    call = recorded(request, {"error": {"message": "\ud83d"}}, status=400)
    reply = found(tmp_path, call).of(call)
    assert (reply.user, reply.detail, reply.calls[0].model) == ("?", "?", "?")


@pytest.mark.slow
@given(sent=st.lists(st.tuples(VALUES, VALUES, st.sampled_from(PATHS)), min_size=1, max_size=6))
def test_whatever_is_sent_is_placed(sent: list[tuple[Any, Any, str]]) -> None:
    calls = [recorded(request, response, path=path, began=n) for n, (request, response, path) in enumerate(sent)]
    check_all_are_placed(calls)


@for_each("levels", [100, 300, 900, 5000])
def test_deep_messages_are_placed(levels: int) -> None:
    nested = "[" * levels + "]" * levels
    for content in (nested, f'"a", "tool_calls": [{{"function": {{"name": "f", "arguments": {nested}}}}}]'):
        for role in ("user", "assistant"):
            body = f'{{"messages": [{{"role": "{role}", "content": {content}}}]}}'.encode()
            check_all_are_placed([recorded(body, completion(assistant("a")))])


def check_all_are_placed(calls: list[RecordedCall]) -> None:
    with log_of(calls) as log:
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
        while conversations.place(LATER_NS):
            pass
        batch = conversations.batch(conversations.found(LATER_NS))
        found = handed_on(conversations)
    assert sorted(call.request_id for reply in found for call in reply.calls) == sorted(
        call.request_id for call in calls
    )
    rows = (*batch.entries, *batch.dead)
    assert sorted(row.trace_id for row in rows) == sorted(reply.trace_id for reply in found)
    for row in rows:
        assert all(value.encode() is not None for value in asdict(row).values() if isinstance(value, str))


class Client:
    """One conversation of a generated scenario: which of its steps are turns, and which are calls of tools."""

    def __init__(self, number: int, opening: int, steps: list[bool]) -> None:
        self.number = number
        self.steps = steps
        self.messages: list[dict[str, Any]] = [SYSTEM, user(f"opening {opening}")]
        self.calls: list[RecordedCall] = []
        self.turns: list[list[RecordedCall]] = [[]]
        self._asks_tool = False

    def go_on(self, began: float, seconds: float) -> None:
        done = len(self.calls)
        calls = self._asks_tool = self.steps[done]
        call_id = f"call-{self.number}-{done}"
        answer = assistant(None, tool_call("f", '{"a":1}', call_id)) if calls else assistant(f"{self.number}.{done}")
        if calls:
            answer["content"] = f"{self.number}.{done}"
        call = asked(self.messages, answer, began, seconds=seconds)
        self.calls.append(call)
        self.turns[-1].append(call)
        self.messages = [*self.messages, answer, tool("1", call_id) if calls else user("on")]
        if not calls:
            self.turns.append([])

    @property
    def is_done(self) -> bool:
        return len(self.calls) == len(self.steps)


@contextmanager
def log_of(calls: list[RecordedCall]) -> Iterator[CallLog]:
    with tempfile.TemporaryDirectory() as folder, CallLog(Path(folder) / "calls.db") as log:
        log.append(calls)
        yield log


SCRIPTS = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.booleans(), min_size=1, max_size=5)), min_size=1, max_size=5
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(scripts=SCRIPTS, data=st.data())
def test_any_interleaving_of_conversations_gives_the_conversations_back(
    scripts: list[tuple[int, list[bool]]], data: st.DataObject
) -> None:
    clients = [Client(number, opening, steps) for number, (opening, steps) in enumerate(scripts)]
    free_at = dict.fromkeys(range(len(clients)), 0.0)
    now = 0.0
    while waiting := [client for client in clients if not client.is_done]:
        client = data.draw(st.sampled_from(waiting))
        now = max(now + 0.01, free_at[client.number])
        seconds = data.draw(st.sampled_from([0.005, 0.5, 30.0]))
        client.go_on(now, seconds)
        free_at[client.number] = now + seconds + data.draw(st.sampled_from([0.0, 5.0]))
    calls = sorted((call for client in clients for call in client.calls), key=lambda call: call.ended_ns)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(calls)), max_size=3)))
    with log_of([]) as log:
        replies: dict[str, Reply] = {}
        for begin, end in zip([0, *cuts], [*cuts, len(calls)], strict=True):
            # As the daemon reads them: what had ended by a time, and a new process each time.
            log.append(calls[begin:end])
            conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
            while conversations.place(calls[end].ended_ns if end < len(calls) else LATER_NS):
                pass
            replies |= {reply.id: reply for reply in handed_on(conversations)}
        result = Found(list(replies.values()))
    for client in clients:
        for call in client.calls:
            assert result.of(call).conversation == result.of(call).root == conversation_of(client.calls[0])
        for turn in client.turns:
            for call in turn:
                assert result.calls(call) == [each.request_id for each in turn]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 6), length=st.integers(1, 4), data=st.data())
def test_conversations_that_are_equal_word_for_word_are_told_apart(
    count: int, length: int, data: st.DataObject
) -> None:
    """It cannot be known which is which, but there are as many, as long, and each call follows one that had ended."""
    clients = [Client(0, 0, [False] * length) for _ in range(count)]
    now = 0.0
    while waiting := [client for client in clients if not client.is_done]:
        data.draw(st.sampled_from(waiting)).go_on(now, 1.0)
        now += 2.0
    calls = [call for client in clients for call in client.calls]
    with log_of(sorted(calls, key=lambda call: call.ended_ns)) as log:
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
        while conversations.place(LATER_NS):
            pass
        result = Found(handed_on(conversations))
    chains: dict[str, list[RecordedCall]] = {}
    for call in sorted(calls, key=lambda call: call.started_ns):
        assert result.of(call).conversation == result.of(call).root
        chains.setdefault(result.of(call).conversation, []).append(call)
    assert [len(chain) for chain in chains.values()] == [length] * count
    assert all(
        len(call.request) > len(before.request) for chain in chains.values() for before, call in pairwise(chain)
    )


def test_another_agent_that_goes_on_gives_a_reply_of_its_own_in_the_same_split(tmp_path: Path) -> None:
    """Agents of several targets have aliases of their own."""
    messages: list[dict[str, Any]] = [SYSTEM, user("Plan it.")]
    plan = asked(messages, assistant("First a, then b."), 0, request={"model": "planner"})
    messages.append(assistant("First a, then b."))
    done = asked([*messages, user("Do it.")], assistant("Done."), 10, request={"model": "worker"})
    next_plan = asked([*messages, user("And then?")], assistant("Then c."), 20, request={"model": "planner"})
    replies = found(tmp_path, plan, done, next_plan)
    assert [replies.calls(call) for call in (plan, done, next_plan)] == [
        [call.request_id] for call in (plan, done, next_plan)
    ]
    first, second, third = (replies.of(call) for call in (plan, done, next_plan))
    assert (first.conversation, third.conversation) == (conversation_of(plan), conversation_of(plan))
    assert (second.conversation, second.root) == (conversation_of(done), conversation_of(plan))


def test_what_was_noted_of_an_erased_call_is_erased(tmp_path: Path) -> None:
    hello = asked([user("hello")], assistant("Hi"), 0, request={"user": "ana"})
    more = asked([user("hello"), assistant("Hi"), user("more")], assistant("Yes"), 10, request={"user": "ana"})
    other = asked([user("other")], assistant("No"), 20)
    new = asked([user("new")], assistant("No"), 30)
    with CallLog(tmp_path / "calls.db") as log:
        log.append([hello, more, other])
        conversations = Conversations(log, idle_ns=int(IDLE * SECOND_NS))
        while conversations.place(at(29)):
            pass
        log.append([new])
        assert conversations.place(at(1)) == 0  # It is listed, and not placed yet.
        conversations.erase([hello.request_id, more.request_id, new.request_id])
        assert log.purge()
        while conversations.place(LATER_NS):
            pass
        assert [reply.id for reply in handed_on(conversations)] == [other.request_id]
        assert conversations.placed() == [other.request_id]
        with_answer = select(placed_calls.placed_calls.c.request_id).join(call_hashes)
        assert conversations.rows(with_answer) == [(other.request_id,)]
    assert b"ana" not in (tmp_path / "calls.db").read_bytes()


def test_calls_that_go_on_from_a_call_are_found(tmp_path: Path) -> None:
    begin, answer = [SYSTEM, user("hello")], assistant("Hi")
    first = asked(begin, answer, 0)
    second = asked([*begin, answer, user("more")], assistant("Yes"), 10)
    third = asked([*begin, answer, user("more"), assistant("Yes"), user("bye")], assistant("Bye"), 20)
    asked_again = chat([*begin, answer, user("more"), assistant("Yes"), user("so")])
    failed = recorded(asked_again, {"error": {"message": "full"}}, began=25, status=500)
    retried = asked([*begin, answer, user("more"), assistant("Yes"), user("so"), answer, user("x")], answer, 26)
    # Others begin with the same words, have another key, user or conversation, or came before.
    same = asked(begin, assistant("Hi!"), 5)
    of_same = asked([*begin, assistant("Hi!"), user("more")], answer, 6)
    of_key = asked([*begin, answer, user("more")], answer, 30, credential="c2")
    of_user = asked([*begin, answer, user("more")], answer, 31, request={"user": "bo"})
    named = replace(asked([*begin, answer, user("more")], answer, 32), conversation="c-2")
    with CallLogCopy(tmp_path / "calls.db") as log:
        log.append([first, same, of_same, second, third, failed, retried, of_key, of_user, named])
        extended = [second, third, failed, retried]
        assert set(extending(log, [first.request_id])) == {call.request_id for call in [*extended, named]}
        assert set(extending(log, [second.request_id])) == {call.request_id for call in extended[1:]}
        assert extending(log, [third.request_id]) == []
        assert extending(log, [failed.request_id]) == [retried.request_id]
        log.erase([first.request_id])
        log.append([renamed := replace(first, request_id="fw-1", conversation="c-1")])
        log.append([replace(named, request_id="fw-2"), replace(second, request_id="fw-3")])
        assert extending(log, [renamed.request_id]) == ["fw-3"]
