"""The rule by which calls are put together, against a model of conversations: strangers with equal words and equal
ids of tool calls, reminders behind questions, forks, retries, swaps of the version within a reply, compressed
contexts, and several servers whose logs are read one after the other."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flywheel.records.states import SkipReason
from flywheel.serving.calls.call_log import CallLog, RecordedCall
from tests.sources.calls.placing import Conversations, Reply
from tests.sources.calls.recorded import (
    SECOND_NS,
    assistant,
    chat,
    completion,
    recorded,
    tool,
    tool_call,
    user,
)

SYSTEM = {"role": "system", "content": "Be brief."}
REMINDER = user("<system-reminder>\nIt is Monday.\n</system-reminder>")
IDLE_NS = 3600 * SECOND_NS
LATER_NS = 2 * 10**18
Json = dict[str, Any]


@dataclass
class Point:
    """A call that was answered, and the messages with its answer: where a client can go back to."""

    messages: list[Json]
    conversation: str
    root: str
    continued_at: float | None = None
    """When the first call that continues it had ended."""


@dataclass
class Client:
    """One conversation of the model: what it sends next, and the names that its next call is expected to have."""

    number: int
    messages: list[Json]
    has_equal_ids: bool
    before: Point | None = None
    """The call that the next one continues."""
    conversation: str = ""
    root: str = ""
    turn: list[RecordedCall] = field(default_factory=list)
    is_in_loop: bool = False
    free_at: float = 0.0


class Model:
    """Clients that send calls, what is to be found of each call, and the points to go back to."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.now = 0.0
        self.clients: list[Client] = []
        self.points: list[Point] = []
        self.calls: list[tuple[int, RecordedCall]] = []
        """Each with the number of the server that recorded it."""
        self.expected: dict[str, tuple[list[RecordedCall], str, str]] = {}
        """By request id: the calls of its reply, its conversation and the root."""

    def begin(self) -> None:
        opening = [SYSTEM, user(f"opening {self.draw(st.integers(0, 1))}")]
        self.clients.append(self._client(opening + [REMINDER] * self.draw(st.booleans())))

    def fork(self) -> None:
        """Another question behind an answer that was continued already."""
        if points := [point for point in self.points if point.continued_at is not None]:
            point = self.draw(st.sampled_from(points))
            client = self._client([*point.messages, user(f"or {len(self.clients)}")])
            client.before, client.root, client.free_at = point, point.root, point.continued_at or 0.0
            self.clients.append(client)

    def compress(self, client: Client) -> None:
        """The client goes on in its tool loop with a summary of what was before."""
        if client.is_in_loop and not client.has_equal_ids:
            *_, asked, result = (each for each in client.messages if each != REMINDER)
            summary = [SYSTEM, user(f"in short {client.number} {len(self.calls)}"), asked, result]
            client.messages, client.before, client.conversation, client.turn = summary, None, "", []

    def send(self, client: Client) -> None:
        """A call: it fails, and is sent again by the next one; or asks for a tool; or answers."""
        kind = self.draw(st.sampled_from(["fails", "tool", "tool", "answers", "answers"]))
        self.now = max(self.now, client.free_at) + 0.01
        seconds = self.draw(st.sampled_from([0.005, 0.5, 30.0]))
        name = f"{client.number}.{len(self.calls)}"
        call_id = "call-1" if client.has_equal_ids else f"call-{name}"
        said = assistant(None, tool_call("f", f'{{"of": "{name}"}}', call_id)) if kind == "tool" else assistant(name)
        response, status = ({"error": {"message": "full"}}, 503) if kind == "fails" else (completion(said), 200)
        version = self.draw(st.sampled_from(["base", "agent@r0001"]))
        times = {"began": self.now, "seconds": seconds, "status": status, "version": version}
        call = recorded(chat(client.messages), response, **times)
        self.calls.append((self.draw(st.integers(0, 1)), call))
        client.free_at = self.now + seconds
        own = f"calls-{call.request_id.rpartition('-')[2]}"
        if kind == "fails":
            conversation = client.before.conversation if client.before is not None else own
            self.expected[call.request_id] = [call], conversation, client.root or own
            return
        client.conversation = client.conversation or own
        client.root = client.root or own
        client.turn.append(call)
        self.expected[call.request_id] = client.turn, client.conversation, client.root
        if client.before is not None and client.before.continued_at is None:
            client.before.continued_at = client.free_at
        answered = [*client.messages, said]
        client.before = Point(answered, client.conversation, client.root)
        self.points.append(client.before)
        client.is_in_loop = kind == "tool"
        client.messages = [*answered, tool("1", call_id) if kind == "tool" else user("on")]
        client.messages += [REMINDER] * self.draw(st.booleans())
        if kind == "answers":
            client.turn = []

    def _client(self, messages: list[Json]) -> Client:
        return Client(len(self.clients), messages, self.draw(st.booleans()))


def found_in(model: Model, cuts: list[int]) -> dict[str, Reply]:
    """The replies by request id, as several processes find them that read up to these calls, a server at a time."""
    calls = sorted(model.calls, key=lambda each: each[1].ended_ns)
    found: dict[str, Reply] = {}
    with tempfile.TemporaryDirectory() as folder, CallLog(Path(folder) / "calls.db") as log:
        for begin, end in zip([0, *cuts], [*cuts, len(calls)], strict=True):
            for server in (1, 0):
                log.append(call for of, call in calls[begin:end] if of == server)
            conversations = Conversations(log, idle_ns=IDLE_NS)
            before_ns = calls[end][1].ended_ns if end < len(calls) else LATER_NS
            while conversations.place(before_ns):
                pass
            while replies := conversations.due(LATER_NS):
                found |= {call.request_id: reply for reply in replies for call in reply.calls}
                conversations.hand_on(replies)
    return found


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_rule_finds_the_conversations_of_the_model(data: st.DataObject) -> None:
    model = Model(data.draw)
    for _ in range(data.draw(st.integers(1, 4))):
        model.begin()
    for _ in range(data.draw(st.integers(1, 14))):
        step = data.draw(st.sampled_from(["send", "send", "send", "send", "fork", "compress"]))
        client = data.draw(st.sampled_from(model.clients))
        if step == "fork":
            model.fork()
        elif step == "compress":
            model.compress(client)
        else:
            model.send(client)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(model.calls)), max_size=3)))
    found = found_in(model, cuts)
    assert found.keys() == model.expected.keys()
    for request_id, (turn, conversation, root) in model.expected.items():
        reply = found[request_id]
        assert [call.request_id for call in reply.calls] == [call.request_id for call in turn]
        assert (reply.conversation, reply.root) == (conversation, root)
        is_failed = len(turn) == 1 and turn[0].status != 200
        assert (reply.skip is SkipReason.ERROR) is is_failed


def test_a_stranger_who_begins_with_the_same_words_and_answer_is_not_continued() -> None:
    """The longest beginning counts, although the stranger's call is newer and nothing continues it."""
    talk = [user("hello"), assistant("Hi"), user("my card was stolen"), assistant("Which?"), user("the red one")]
    calls = [
        recorded(chat(talk[:end]), completion(talk[end] if end < 5 else assistant("It is blocked.")), began=at)
        for end, at in ((1, 0), (3, 10), (1, 20), (5, 30))
    ]
    first, second, stranger, third = (call.request_id for call in calls)
    with tempfile.TemporaryDirectory() as folder, CallLog(Path(folder) / "calls.db") as log:
        log.append(calls)
        conversations = Conversations(log, idle_ns=IDLE_NS)
        conversations.place(LATER_NS)
        of = {reply.id: reply.conversation for reply in conversations.due(LATER_NS)}
    assert of[first] == of[second] == of[third] != of[stranger]


def test_the_calls_of_another_user_or_key_are_never_put_together() -> None:
    first = recorded(chat([user("hello")]), completion(assistant("Hi")))
    on = [user("hello"), assistant("Hi"), user("on")]
    others = [
        recorded(chat(on, user="ann"), completion(assistant("b")), began=10),
        replace(recorded(chat(on), completion(assistant("b")), began=20), credential="c2"),
    ]
    with tempfile.TemporaryDirectory() as folder, CallLog(Path(folder) / "calls.db") as log:
        log.append([first, *others])
        conversations = Conversations(log, idle_ns=IDLE_NS)
        conversations.place(LATER_NS)
        assert len({reply.root for reply in conversations.due(LATER_NS)}) == 3
