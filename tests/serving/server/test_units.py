"""Requests to an alias in an A/B test: by what a unit is known, and which version answers it."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.request_id import new_request_id
from flywheel.serving.alias_target import ABTest, AliasTarget
from flywheel.serving.calls.call_log import RecordedCall
from flywheel.serving.server import middleware as middleware_module
from flywheel.serving.server import version_assignment
from flywheel.serving.server.asgi import MAX_DEPTH
from flywheel.serving.server.middleware import AliasMiddleware
from flywheel.serving.server.version_assignment import MAX_MESSAGES
from flywheel.system.server_limits import Message, Receive, Scope, Send
from tests.serving.fake_vllm import BASE, answer, with_middleware

NEW, OLD = "agent@r0002", "agent@r0001"
USER = {"role": "user", "content": "What is 12 times 34?"}
CHAT = "/v1/chat/completions"


class Server:
    """A middleware whose alias has an A/B test, without a socket: it keeps what would have been recorded."""

    def __init__(self, share: float = 0.5, *, salt: str = "salt", other: str = OLD) -> None:
        self.calls: list[RecordedCall] = []
        self.bodies: list[bytes] = []
        self.middleware: AliasMiddleware = with_middleware(self._vllm)
        self.middleware._recorder = self  # type: ignore[assignment]
        ab_test = ABTest(AliasTarget(other, "/adapters/r0001"), share, salt)
        target = AliasTarget(NEW, "/adapters/r0002", ab_test=ab_test)
        asyncio.run(self.middleware._aliases.point("agent", target))

    async def recorded(
        self, call: RecordedCall, app: Any, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        self.calls.append(call)
        self.bodies.append(body)
        await answer(send, 200, None)

    async def _vllm(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])
        await answer(send, 200, None)

    @property
    def served(self) -> str:
        return str(json.loads(self.bodies[-1])["model"])

    def send(self, body: bytes, path: str = CHAT, **headers: str) -> int:
        """The status of the answer."""
        named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        given = [(b"host", b"localhost"), (b"content-type", b"application/json"), *named]
        scope = {"type": "http", "method": "POST", "path": path, "headers": given, "query_string": b""}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(self.middleware(scope, receive, send))
        return int(sent[0]["status"])

    def ask(self, body: dict[str, Any] | None = None, path: str = CHAT, **headers: str) -> RecordedCall:
        sent = {"model": "agent", **({"messages": [USER]} if body is None else body)}
        assert self.send(json.dumps(sent).encode(), path, **headers) == 200
        assert self.served == {"base": BASE}.get(self.calls[-1].version, self.calls[-1].version)
        return self.calls[-1]

    def unit(self, *messages: dict[str, Any], user: str | None = None, key: str = "Bearer a", **more: Any) -> str:
        named = {} if user is None else {"user": user}
        return self.ask({"messages": list(messages), **named, **more}, authorization=key).unit


def test_what_a_unit_is_known_by() -> None:
    server = Server()
    call = server.ask(x_flywheel_conversation="thread 7", x_litellm_session_id="s")
    assert (call.unit_kind, len(call.unit)) == ("conversation", 16)
    assert int(call.unit, 16) >= 0
    assert server.ask({"messages": []}, x_flywheel_conversation=" thread 7 ").unit == call.unit
    session = server.ask(x_litellm_session_id="s")
    assert session.unit_kind == "session"
    fallback = server.ask(user="")
    assert fallback.unit_kind == "fallback"
    # One text as three kinds is three units.
    assert len({call.unit, session.unit, fallback.unit}) == 3
    same = server.ask(x_flywheel_conversation="s").unit
    assert same != session.unit
    # Nothing that a header can hold is an error.
    for header in ("", "   ", "x" * 513):
        assert server.ask(x_flywheel_conversation=header, x_litellm_session_id="s").unit == session.unit
        assert server.ask(x_flywheel_conversation=header, x_litellm_session_id=header).unit == fallback.unit
    assert server.ask(x_flywheel_conversation="x" * 512).unit_kind == "conversation"
    assert server.ask(x_flywheel_conversation="\xfc\xe9").unit_kind == "conversation"


@given(st.lists(st.text(max_size=6), max_size=4), st.text(max_size=6), st.text(max_size=6))
def test_a_fallback_unit_stays_while_its_conversation_grows(later: list[str], clock: str, other: str) -> None:
    server = Server()
    system = {"role": "system", "content": f"It is {clock}."}
    unit = server.unit({"role": "system", "content": "It is noon."}, USER)
    more = [{"role": "user" if at % 2 else "assistant", "content": text} for at, text in enumerate(later)]
    assert server.unit(system, USER, *more, prompt_cache_key=other, metadata={"user": other}) == unit
    assert server.unit(USER, *more, temperature=0.5) == unit


@given(
    st.tuples(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)),
    st.tuples(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5)),
)
def test_units_differ_by_credential_user_and_first_message(one: tuple[str, ...], two: tuple[str, ...]) -> None:
    """However the same bytes are divided between them."""
    server = Server()

    def unit(key: str, user: str, text: str) -> str:
        return server.unit({"role": "user", "content": text}, user=user, key=f"Bearer {key.encode().hex()}")

    assert (unit(*one) == unit(*two)) == (one == two)


def test_no_user_is_another_unit_than_an_empty_one_and_credentials_count() -> None:
    server = Server()
    units = {server.unit(USER), server.unit(USER, user=""), server.unit(USER, user="a"), server.unit(USER, key="b")}
    assert len(units) == 4


@pytest.mark.parametrize(
    ("path", "body", "same"),
    [
        (CHAT, {"messages": [{"role": "developer", "content": "x"}, USER]}, {"messages": [USER]}),
        ("/v1/messages", {"system": "x", "messages": [USER]}, {"messages": [USER], "max_tokens": 3}),
        ("/v1/responses", {"instructions": "x", "input": "Who?"}, {"input": "Who?"}),
        ("/v1/responses", {"input": [{"type": "reasoning"}, USER, {"role": "assistant"}]}, {"input": [USER]}),
        ("/v1/completions", {"prompt": "Once", "n": 2}, {"prompt": "Once"}),
        ("/v1/completions", {"prompt": [1, 2]}, {"prompt": [1, 2]}),
    ],
)
def test_the_first_message_of_each_api(path: str, body: dict[str, Any], same: dict[str, Any]) -> None:
    server = Server()
    versions = set()
    units = set()
    for given_body in (body, same):
        sent = json.dumps({"model": "agent", **given_body}).encode()
        assert server.send(sent, path) == 200
        versions.add(server.served)
        units |= {call.unit for call in server.calls}
    assert len(versions) == 1
    assert len(units) <= 1  # Some paths are not recorded.
    # Another question is another unit.
    changed = json.loads(json.dumps(body).replace("Who?", "Why?").replace("12 times", "13 times"))
    changed = {**changed, "prompt": "Twice"} if "prompt" in body else changed
    if server.calls:
        server.send(json.dumps({"model": "agent", **changed}).encode(), path)
        assert server.calls[-1].unit not in units


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "user", "a"]), inner),
    max_leaves=12,
)
members = st.dictionaries(
    st.sampled_from(["messages", "input", "prompt", "user", "previous_response_id", "model", "x"]), values
)


@given(members, st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"]), st.booleans())
def test_replicas_agree_about_any_body(body: dict[str, Any], encoding: str, ensure_ascii: bool) -> None:
    one, two = Server(), Server()
    content = json.dumps({**body, "model": "agent"}, ensure_ascii=ensure_ascii).encode(encoding, "surrogatepass")
    for server in (one, two):
        assert server.send(content) == 200
    assert [(c.unit, c.arm, c.version) for c in one.calls] == [(c.unit, c.arm, c.version) for c in two.calls]
    assert one.calls[0].arm in ("new", "old")


@given(st.binary() | st.text().map(lambda text: f'{{"model": "agent", "messages": [{text}'.encode("utf-8", "ignore")))
def test_what_is_no_json_is_left_to_the_server(body: bytes) -> None:
    server = Server()
    assert server.send(body) in (200, 400)
    assert server.send(body + b"]}") in (200, 400)


@pytest.mark.parametrize(
    "messages",
    [
        '["user", {"role": 1}, null]', '{"role": "user"}', "[{}]", '[{"role": {"role": "user"}}]',
        '[{"role": "\\ud800"}]', "17", "[[],[]]",
    ],
)  # fmt: skip
def test_messages_without_a_user_are_one_unit(messages: str) -> None:
    server = Server()
    assert server.send(f'{{"model": "agent", "messages": {messages}}}'.encode()) == 200
    assert server.calls[-1].unit_kind == "fallback"


@pytest.mark.parametrize("messages", ['[{"role" "user"}]', '[{"role": "\\u00"}]', '[{"role": "us\x01er"}]'])
def test_messages_that_are_no_json_reach_the_server_as_they_are(messages: str) -> None:
    server = Server()
    body = f'{{"model": "agent", "messages": {messages}}}'.encode()
    assert server.send(body) == 200
    assert (server.bodies, server.calls) == ([body], [])


@pytest.mark.parametrize(
    "members",
    [
        b'"messages": [{"role": "user", "content": "\xff"}]',
        b'"messages": [{"role": "\xff"}]',
        b'"messages": [], "metadata": {"user_id": "\xff"}',
        b'"messages": [], "user": "\xff"',
        b'"messages": [], "user": "\xed\xa0\x80", "metadata": {"user_id": "\xed\xa0\x80"}',
    ],
)
def test_bytes_that_are_no_utf8_are_no_error_of_the_middleware(members: bytes) -> None:
    server = Server()
    for path in (CHAT, "/v1/messages"):
        assert server.send(b'{"model": "agent", ' + members + b"}", path) == 200


def test_escapes_are_read() -> None:
    server = Server()
    escaped = (
        rb'{"model": "agent", "messages": [{"ro\u006ce": "sys\u0074em"}, {"r\u006fle": "us\u0065r", "a": 1}, 2]}'
    )
    plain = rb'{"model": "agent", "m\u0065ssages": [{"r\u006fle": "us\u0065r", "a": 1}]}'
    for body in (escaped, plain):
        assert server.send(body) == 200
    assert server.calls[0].unit == server.calls[1].unit
    assert server.send(rb'{"model": "agent", "messages": [{"r\u006fle": "us\u0065r", "a": 2}]}') == 200
    assert server.calls[2].unit != server.calls[0].unit


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_shares_of_the_arms(share: float) -> None:
    server, size = Server(share), 3000
    calls = [server.ask(x_flywheel_conversation=f"c{at}") for at in range(size)]
    new = sum(call.arm == "new" for call in calls)
    # Six standard deviations; the salt is fixed, so the test either always passes or never.
    assert abs(new - share * size) < 6 * math.sqrt(size * share * (1 - share))
    assert {(call.arm, call.version) for call in calls} == {("new", NEW), ("old", OLD)}
    assert len({call.unit for call in calls}) == size
    # The unit, which is stored, does not tell the arm.
    high = sum(int(call.unit, 16) >> 63 for call in calls if call.arm == "new")
    assert abs(high - new / 2) < 6 * math.sqrt(new / 4)


def test_another_salt_is_another_draw() -> None:
    arms = []
    for salt in ("one", "two"):
        server = Server(salt=salt)
        arms.append([server.ask(x_flywheel_conversation=f"c{at}").arm for at in range(400)])
    same = sum(one == two for one, two in zip(*arms, strict=True))
    assert 120 < same < 280


def test_a_response_that_is_continued_leads_to_its_version_and_to_no_arm() -> None:
    server = Server()

    def follow(version: str, **more: Any) -> RecordedCall:
        response = f"resp_{new_request_id('0' * 16, version)}"
        body = {"input": "And then?", "previous_response_id": response, **more}
        return server.ask(body, "/v1/responses", x_flywheel_conversation="c")

    alone = server.ask({"input": "And then?"}, "/v1/responses", x_flywheel_conversation="c")
    assert alone.arm
    for version in (NEW, OLD):
        call = follow(version)
        assert (call.version, call.arm, call.unit, call.unit_kind) == (version, "", alone.unit, "conversation")
    # Nothing else can be chosen: not the base model, not an adapter that is loaded for something else.
    for forged in ("base", BASE, "agent@r0003", "other@r0001", "", "agent", "../agent@r0001"):
        call = follow(forged)
        assert (call.version, call.arm) == (alone.version, alone.arm)
    for value in (None, 7, {"id": "x"}, ["fw-"], "x" * 5000, "\ud800"):
        call = server.ask({"input": "?", "previous_response_id": value}, "/v1/responses", x_flywheel_conversation="c")
        assert (call.version, call.arm) == (alone.version, alone.arm)


def test_the_base_model_can_be_the_other_version() -> None:
    server = Server(other=BASE)
    versions = {call.version: call.arm for call in (server.ask(x_flywheel_conversation=f"c{at}") for at in range(50))}
    assert versions == {NEW: "new", "base": "old"}
    response = f"resp_{new_request_id('0' * 16, 'base')}"
    call = server.ask({"previous_response_id": response, "input": "?"}, "/v1/responses")
    assert (call.version, call.arm) == ("base", "")


@pytest.mark.parametrize(("missing", "answers"), [(NEW, OLD), (OLD, NEW)])
def test_the_share_of_a_missing_version_goes_to_the_other_and_the_arm_stays(missing: str, answers: str) -> None:
    whole, server = Server(), Server()
    server.middleware._aliases.missing = {"agent": missing}
    for at in range(30):
        expected, found = (each.ask(x_flywheel_conversation=f"c{at}") for each in (whole, server))
        assert (found.unit, found.arm, found.version) == (expected.unit, expected.arm, answers)
    response = f"resp_{new_request_id('0' * 16, missing)}"
    assert server.ask({"previous_response_id": response, "input": "?"}, "/v1/responses").version == answers


def test_without_an_ab_test_there_is_no_unit() -> None:
    server = Server()
    asyncio.run(server.middleware._aliases.point("agent", AliasTarget(NEW)))
    call = server.ask(x_flywheel_conversation="c")
    assert (call.version, call.unit, call.arm, call.unit_kind) == (NEW, "", "", "")


def test_bodies_that_cost_more_than_they_say_are_refused_before_a_unit_is_looked_for() -> None:
    server = Server()
    deep = b'{"model": "agent", "messages": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}"
    many = b'{"model": "agent", "messages": [' + b",".join([b"{}"] * 60_000) + b"]}"
    keys = b'{"model": "agent", ' + b",".join(b'"user": "%d"' % at for at in range(2000)) + b"}"
    with mock.patch.object(middleware_module, "assign", side_effect=AssertionError):
        assert [server.send(body) for body in (deep, many, keys)] == [400, 400, 400]


def test_messages_are_read_up_to_the_first_of_the_user() -> None:
    """Each takes the server's event loop some of its time."""
    server = Server()
    system = {"role": "system", "content": [{"type": "text", "text": "x"}] * 100}
    later = [{"role": "assistant", "content": [{"type": "text", "text": "y"}] * 100}] * 100

    def read(messages: list[dict[str, Any]], **headers: str) -> int:
        with mock.patch.object(version_assignment, "_value", wraps=version_assignment._value) as value:
            server.ask({"messages": messages}, **headers)
        return value.call_count

    assert read([system, USER, *later], x_flywheel_conversation="c") == 0
    assert read([system, USER, *later]) == 2
    assert read([system, *later, USER]) == MAX_MESSAGES


def test_half_a_surrogate_pair_later_in_a_conversation_leaves_its_unit() -> None:
    server = Server()
    assert server.unit(USER, {"role": "user", "content": "\ud800"}) == server.unit(USER)
