"""The demo's judge: an OpenAI-compatible server that really checks arithmetic and `\\boxed{}`.

`python -m flywheel.cli.demo.judge [--port N]` serves until it is stopped. Owns the checking; what it is asked, and
which criteria with which choices, it learns from the request alone, as any judging model would.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias

from flywheel.cli.demo.questions import solve
from flywheel.judge.prompt import parse_sections
from flywheel.judge.rubric.checks.math_equal import boxed

MODEL: Final = "demo-judge"
MAX_BODY_BYTES: Final = 4 << 20
_NUMBER: Final = re.compile(r"-?\d+")

Complete: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Findings:
    """What is so about one answer. `value` is the final number it gives, boxed or not."""

    expected: int | None
    value: int | None
    boxed: bool

    @property
    def right(self) -> bool:
        return self.expected is not None and self.value == self.expected


def examine(question: str, answer: str) -> Findings:
    """Check an answer: the last `\\boxed{}` counts, and the last number where there is none."""
    content = boxed(answer)
    numbers = _NUMBER.findall(answer if content is None else content)
    value = int(numbers[-1]) if numbers else None
    is_boxed = content is not None and _NUMBER.fullmatch(content.strip()) is not None
    return Findings(solve(question), value, is_boxed)


def grade(criterion: str, choices: list[str], found: Findings) -> dict[str, str]:
    """The verdict on one criterion, whose choices are listed worst to best.

    Its id says what it is about: the box, the value, or the answer as a whole.
    """
    about_box, about_value = "box" in criterion, "correct" in criterion or "right" in criterion
    if about_box and not about_value:
        good, reason = found.boxed, "The number is boxed." if found.boxed else "No number stands in \\boxed{}."
    elif about_value:
        good, reason = found.right, f"{found.expected} is right; the answer says {found.value}."
    else:
        good = found.right and found.boxed
        reason = f"{found.expected} is right; the answer says {found.value}, {'' if found.boxed else 'not '}boxed."
    return {"reason": reason, "choice": choices[-1] if good else choices[0]}


def criteria_of(request: Mapping[str, Any]) -> dict[str, list[str]]:
    """The criteria that are asked for, id → choices. Raises KeyError or TypeError where the request names none."""
    schema = request["response_format"]["json_schema"]["schema"]
    asked = schema["properties"]["criteria"]["properties"]
    return {name: list(fields["properties"]["choice"]["enum"]) for name, fields in asked.items()}


def token_of(request: Mapping[str, Any]) -> str:
    """The token that the rules ask for in the reply's last field."""
    rules = next(message["content"] for message in request["messages"] if message["role"] == "system")
    return str(rules).partition('"check": "')[2].partition('"')[0]


def complete(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion that answers a judge's request. Raises KeyError or TypeError for any other request."""
    asked = criteria_of(request)
    said = [parse_sections(message["content"]) for message in request["messages"] if message["role"] == "user"]
    sections = next(each for each in said if "QUESTION" in each)
    found = examine(sections["QUESTION"], sections["ANSWER"])
    criteria = {name: grade(name, choices, found) for name, choices in asked.items()}
    content = json.dumps({"criteria": criteria, "check": token_of(request)})
    sent = sum(len(message["content"]) for message in request["messages"])
    return completion(str(request.get("model", MODEL)), content, sent)


def completion(model: str, content: str, sent: int) -> dict[str, Any]:
    """A chat completion in OpenAI's form. Its tokens are four characters each, of which `sent` were in the prompt."""
    usage = {"prompt_tokens": sent // 4 + 1, "completion_tokens": len(content) // 4 + 1}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "demo"}]})
        else:
            self._answer(404, {"error": {"message": f"there is no {self.path}"}})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(min(length, MAX_BODY_BYTES))
        if self.path != "/v1/chat/completions":
            self._answer(404, {"error": {"message": f"there is no {self.path}"}})
            return
        try:
            self._answer(200, self.server.complete(json.loads(body)))
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            message = f"this judge answers Flywheel's own requests only ({type(error).__name__}: {error})"
            self._answer(400, {"error": {"message": message, "type": "invalid_request_error"}})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
        """Nothing is logged: the demo's panel has the terminal."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, complete: Complete) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.complete = complete

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is no news; anything else is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def running(port: int = 0, complete: Complete = complete) -> Iterator[str]:
    """The judge on a port of the loopback (0: one that the system chooses); its base URL, with `/v1`.

    Another `complete`, which returns the chat completion for a request, makes another scripted model of it; its
    ValueError, KeyError and TypeError are answered with 400.
    """
    server = _Server(port, complete)
    # Answers are small and waited for: nothing is gained by collecting them.
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="judge")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge arithmetic over an OpenAI-compatible endpoint.")
    parser.add_argument("--port", type=int, default=8001)
    with running(parser.parse_args().port) as url, contextlib.suppress(KeyboardInterrupt):
        print(f"judging on {url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
