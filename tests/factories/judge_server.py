"""An OpenAI-compatible judge in this process, truthful or misbehaving.

`JudgeServer(verdict=…)` answers as `verdict(question, answer)` says; `behaviour=` makes it play one of the faults. It
counts what it was asked and how many calls were in flight at once.
"""

from __future__ import annotations

import json
import math
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

from flywheel.judge.chat_completions import KNOWN
from flywheel.judge.prompt import parse_sections
from tests.factories.judge_faults import ERROR_OBJECTS, REFUSALS, chat_completion, stream
from tests.factories.local_server import JsonHandler, LocalServer

Verdict = Callable[[str, str], bool]

LONGEST_SECONDS = 600
"""How long a call is held at most: longer than a test waits for anything."""


def boxed_sum(question: str, answer: str) -> bool:
    """Whether the answer boxes something: truth enough for tests that do not look at verdicts."""
    return bool(question) and re.search(r"\\boxed\{.+\}", answer) is not None


class JudgeServer(LocalServer):
    """A context manager; `base_url` is what the judge's configuration wants. `behaviours` are played in turn,
    `by_key` is for calls with that key. Nobody is answered before `hold_until` calls are in flight at once."""

    def __init__(
        self,
        verdict: Verdict = boxed_sum,
        *,
        behaviour: str | list[str] = "good",
        delay_seconds: float = 0.0,
        hold_until: float = 0,
        by_key: dict[str, str] | None = None,
    ) -> None:
        self.by_key = by_key or {}
        self.models: Any = {"object": "list", "data": [{"id": "judge", "object": "model"}]}
        """What it lists, to whom `by_key` lets."""
        self.wants_key = False
        """Whether it lists nothing without a key."""
        self.listed = 0
        self.verdict = verdict
        self.delay_seconds = delay_seconds
        self.hold_until = hold_until
        self._free = 0
        self._full = threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._behaviours: Iterator[str] = cycle([behaviour] if isinstance(behaviour, str) else behaviour)
        self._lock = threading.Lock()
        super().__init__(_handler(self))
        # A judge of another test may have had this port.
        for known in [key for key in KNOWN._found if self.base_url in key[0]]:
            del KNOWN._found[known]

    @property
    def calls(self) -> int:
        return len(self.requests)

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """The requests about tasks: all but the short ones by which clients find out what is supported."""
        return [each for each in self.requests if parse_sections(each["messages"][-1]["content"])]

    def behave(self, *behaviours: str) -> None:
        self._behaviours = cycle(behaviours)

    def begin(self, request: dict[str, Any], headers: dict[str, str]) -> tuple[int, str]:
        """The number of the call, from 1, and the behaviour that it gets."""
        with self._lock:
            self.requests.append(request)
            self.headers.append(headers)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if len(self.requests) > self._free and self.in_flight >= self.hold_until:
                self._full.set()
            key = headers.get("authorization", "").removeprefix("Bearer ")
            return len(self.requests), self.by_key.get(key) or next(self._behaviours)

    def hold(self, *, after: int = 0, until: float = math.inf) -> None:
        """Answer the next `after` calls, and those that follow once so many are in flight at once, or `let_go`."""
        with self._lock:
            self._free = len(self.requests) + after
            self.hold_until = until
            self._full.clear()

    def let_go(self) -> None:
        """Answer whoever was held, and nobody is held any more."""
        self._full.set()

    def __exit__(self, *error: Any) -> None:
        self.let_go()
        super().__exit__(*error)

    def end(self) -> None:
        with self._lock:
            self.in_flight -= 1

    def content(self, request: dict[str, Any]) -> dict[str, Any]:
        """A whole and truthful reply, by the criteria of the request's schema or else its system message."""
        shown = parse_sections(request["messages"][-1]["content"])
        if not shown:  # a short request, of which only the status counts
            return {"criteria": {"any": {}}}
        good = self.verdict(shown["QUESTION"], shown["ANSWER"])
        return {
            "criteria": {
                name: {"reason": f"it is {'so' if good else 'not so'}", "choice": choices[-1 if good else 0]}
                for name, choices in _criteria(request).items()
            },
            "check": nonce_of(request),
        }


def form_of(request: dict[str, Any]) -> str:
    """The response format, as `judge.response_format` names it."""
    if "response_format" in request:
        return "schema" if request["response_format"]["type"] == "json_schema" else "json"
    return "tool" if "tools" in request else "text"


def nonce_of(request: dict[str, Any]) -> str:
    """The token that the judge is asked to repeat."""
    told = re.search(r'"check": "([0-9a-f]{16})"', request["messages"][0]["content"])
    return told[1] if told else ""


def _criteria(request: dict[str, Any]) -> dict[str, list[str]]:
    schema = None
    if "json_schema" in (wanted := request.get("response_format") or {}):
        schema = wanted["json_schema"]["schema"]
    elif tools := request.get("tools"):
        schema = tools[0]["function"]["parameters"]
    if schema is not None:
        properties = schema["properties"]["criteria"]["properties"]
        return {name: part["properties"]["choice"]["enum"] for name, part in properties.items()}
    lines = re.findall(r"^- (\S+): .* Choices \(worst to best\): (.*)\.$", request["messages"][0]["content"], re.M)
    return {name: choices.split(", ") for name, choices in lines}


def _handler(judge: JudgeServer) -> type[JsonHandler]:
    class Handler(JsonHandler):
        def get(self) -> None:
            judge.listed += 1
            key = self.headers.get("authorization", "").removeprefix("Bearer ")
            fault = judge.by_key.get(key) or ("401" if judge.wants_key and not key else "")
            if self.path != "/v1/models" or judge.models is None:
                fault = "404"
            self.send(int(fault[:3]) if fault else 200, judge.models if not fault else {"error": fault})

        def post(self, request: dict[str, Any]) -> None:
            number, behaviour = judge.begin(request, {name.lower(): value for name, value in self.headers.items()})
            try:
                if number > judge._free:
                    judge._full.wait(LONGEST_SECONDS)
                if judge.delay_seconds:
                    time.sleep(judge.delay_seconds)
                self.play(behaviour, request)
            finally:
                judge.end()

        def play(self, behaviour: str, request: dict[str, Any]) -> None:
            good = partial(self.completion, "good", request)
            said_no = next((row for row in REFUSALS.get(behaviour, ()) if row[0](request)), None)
            if said_no:
                _, status, error = said_no
                self.send(status, {"error": error if isinstance(error, dict) else {"code": status, "message": error}})
            elif behaviour[:3].isdigit():
                waits = {"Retry-After": "0.01", "in a minute": "60", "tomorrow": "86400"}
                wait = next((wait for words, wait in waits.items() if words in behaviour), None)
                headers = {"retry-after": wait} if wait is not None else {}
                quota = {name: "insufficient_quota" for name in ("type", "code") if f"quota {name}" in behaviour}
                self.send(int(behaviour[:3]), {"error": {"message": f"scripted {behaviour}", **quota}}, headers)
            elif behaviour in ERROR_OBJECTS:
                self.send(200, ERROR_OBJECTS[behaviour])
            elif behaviour.startswith("error object, "):
                self.send(200, {"error": {"message": "no", "code": behaviour.removeprefix("error object, ")}})
            elif behaviour == "broken byte":
                self.send(200, json.dumps(good()).encode().replace(b"it is so", b"it is \xff"))
            elif behaviour == "huge":
                self.send(200, b" " * (5 << 20) + json.dumps(good()).encode())
            elif behaviour == "truncated body":
                self.send(200, json.dumps(chat_completion("x"))[:40].encode())
            elif behaviour in ("streamed", "cut off stream"):
                events = stream(self.text("good", request), whole=behaviour == "streamed")
                self.send(200, events, {"content-type": "text/event-stream"})
            elif behaviour == "stream":
                self.send(200, b"data: {}\n\ndata: [DONE]\n\n", {"content-type": "text/event-stream"})
            elif behaviour == "html":
                self.send(200, b"<html><body>Sign in to the proxy</body></html>", {"content-type": "text/html"})
            elif behaviour == "reset":
                self.reset()
            else:
                self.send(200, self.completion(behaviour, request))

        def text(self, behaviour: str, request: dict[str, Any]) -> str:
            said = judge.content(request)
            criteria = said["criteria"]
            first = next(iter(criteria))
            if behaviour == "missing criterion":
                del criteria[first]
            elif behaviour == "unknown criterion":
                criteria["surprise"] = {"reason": "", "choice": "yes"}
            elif behaviour == "unknown choice":
                criteria[first]["choice"] = "perhaps"
            elif behaviour.startswith("half a character"):
                criteria[first]["reason"] = "good \ud83d"
            elif behaviour == "kept reply":
                said["check"] = nonce_of(judge.requests[0])
            text = json.dumps(said, ensure_ascii=behaviour != "half a character outside")
            # As a judge that forgets to escape what it quotes: the task's own verdict stands whole inside of it.
            quoting = {"criteria": {first: {"reason": "It claims VERDICT, wrongly.", "choice": "no"}}}
            spoiled = {
                "truncated verdict": text[:-10],
                "cut off": text[:20],
                "fenced": f"```json\n{text}\n```",
                "broken json": text.replace('"', "'").replace("it is", "it\nis").replace("}}", "},}"),
                "without nonce": f"My verdict: {json.dumps({'criteria': criteria})}",
                "prose": f"Let me think about {{this}}.\n```json\n{text}\n```\nI hope that helps.",
                "nonsense": "result: GOOD",
                "empty content": "",
                "quoted verdict": json.dumps(quoting).replace("VERDICT", text),
            }
            # These play an endpoint that takes a schema and tools, and pays no attention to either.
            return spoiled.get(behaviour.removeprefix("ignoring, "), text)

        def completion(self, behaviour: str, request: dict[str, Any]) -> dict[str, Any]:
            text = self.text(behaviour, request)
            completion = chat_completion(text)
            choice = completion["choices"][0]
            if behaviour == "refusal":
                choice["message"] = {"role": "assistant", "content": None, "refusal": "I cannot."}
            elif behaviour == "thoughts only":
                choice["message"] = {"role": "assistant", "content": None, "reasoning_content": "Let me see."}
                choice["finish_reason"] = "length"
            elif behaviour == "empty choices":
                completion["choices"] = []
            elif behaviour == "cut off":
                choice["finish_reason"] = "length"
            elif behaviour == "choices of text":
                completion["choices"] = [text]
            elif behaviour == "content of thoughts":
                choice["message"]["content"] = [{"type": "thinking", "thinking": text, "text": text}, text, None]
            elif behaviour == "content of parts":
                thoughts = {"type": "thinking", "thinking": [{"type": "text", "text": '{"criteria": {}}'}]}
                parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
                choice["message"]["content"] = [thoughts, *parts]
            elif "tools" in request and not behaviour.startswith("ignoring"):
                function = {"name": request["tools"][0]["function"]["name"], "arguments": text}
                call = {"id": "call_1", "type": "function", "function": function}
                choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
                choice["finish_reason"] = "tool_calls"
            elif behaviour == "no usage":
                del completion["usage"]
            elif behaviour == "costly":
                completion["usage"] = {"prompt_tokens": 7_900, "completion_tokens": 100}
            elif behaviour == "boundless usage":
                completion["usage"] = {"prompt_tokens": 2**63, "completion_tokens": 10**30}
            return completion

        def reset(self) -> None:
            """Promise a body, send half of it, and reset the connection."""
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"id": "x"')
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    return Handler
