"""What recording costs a request, and how large its file becomes: `python -m benchmarks.calls`.

16 clients, each with a conversation of tool calls that grows to 300 kB (200 kB on average), ask two servers in turn:
uvicorn with the real middleware and a stub in place of vLLM, one with the call log and one without, each in a process
of its own. New calls are pulled every second. The stub takes the time of a fast model, so that the processor is busy
but not exhausted.

Then the calls of `LOADS` are written to a file each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil
import uvicorn

from benchmarks import measurement
from benchmarks.templates import WORDS
from flywheel.serving.calls.call_log import CallLog, RecordedCall
from flywheel.serving.environment_variables import ALIAS_VARIABLE, BASE_VARIABLE, SETTINGS_VARIABLE, ServerSettings
from flywheel.serving.server.middleware import AliasMiddleware
from flywheel.system.server_limits import Receive, Scope, Send

CLIENTS: Final = 16
PLAIN_SECONDS: Final = 0.3
FIRST_TOKEN_SECONDS: Final = 0.1
TOKENS: Final = 60
TOKEN_SECONDS: Final = 0.005
BEGIN_BYTES: Final = 100_000
END_BYTES: Final = 300_000
STEP_BYTES: Final = 10_000
PULL_SECONDS: Final = 1.0


# The server


async def stub(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers like vLLM, in a fixed time."""
    body = (await receive())["body"]
    # vLLM too parses the body on the event loop.
    is_stream = json.loads(body)["stream"]
    kind = b"text/event-stream; charset=utf-8" if is_stream else b"application/json"
    chunk = {
        "id": "chatcmpl-" + dict(scope["headers"])[b"x-request-id"].decode(),
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "base",
        "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
    }
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(FIRST_TOKEN_SECONDS if is_stream else PLAIN_SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if is_stream:
        for at in range(1, TOKENS + 1):
            event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
            # The engine is another process: a token that is sent late does not delay the next one.
            due = began + FIRST_TOKEN_SECONDS + at * TOKEN_SECONDS
            await asyncio.sleep(due - asyncio.get_running_loop().time())
    await send({"type": "http.response.body", "body": json.dumps(chunk).encode()})


def serve(parent: Connection, path: Path | None) -> None:
    os.environ |= {ALIAS_VARIABLE: "agent", BASE_VARIABLE: "base"}
    if path is not None:
        log = {"path": str(path), "keep_days": 14, "max_bytes": 5 * 10**9}
        os.environ[SETTINGS_VARIABLE] = ServerSettings(call_log=log).as_json()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            parent.send(self.servers[0].sockets[0].getsockname()[1])

    settings: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "timeout_keep_alive": 600}
    Server(uvicorn.Config(AliasMiddleware(stub), port=0, **settings)).run()


@contextmanager
def server(path: Path | None) -> Iterator[tuple[int, psutil.Process]]:
    """Its port and process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, path))
    process.start()
    theirs.close()
    try:
        yield ours.recv(), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join()


# The clients


class Conversation:
    """Of an agent with tools. Each body repeats the one before and adds a tool call and its result."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = WORDS.read_text().split()
        described = ({"name": f"tool_{at}", "description": self._text(500)} for at in range(8))
        self._tools = [{"type": "function", "function": each} for each in described]
        self._restart()

    def _restart(self) -> None:
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": self._text(4_000)}]
        self._size = 0
        self._step(BEGIN_BYTES - 4_000)

    def _text(self, size: int) -> str:
        """Lines of words, with quotation marks and other letters, as tools return them."""
        words = self._random.choices([*self._words, "\n", '"x"', "é"], k=size // 7)
        return " ".join(words)

    def _step(self, size: int) -> None:
        calls = [{"id": f"call_{self._random.random()}", "function": {"name": "tool_1", "arguments": '{"a": 1}'}}]
        added: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": calls}]
        added += [{"role": "tool", "content": self._text(4_000)} for _ in range(size // 4_000)]
        added += [{"role": "tool", "content": self._text(size % 4_000)}]
        self._messages += added
        self._size += len(json.dumps(added))

    def next_body(self, *, stream: bool) -> bytes:
        if self._size > END_BYTES:
            self._restart()
        body = {"model": "agent", "messages": self._messages, "tools": self._tools, "stream": stream}
        encoded = json.dumps({**body, "temperature": 0.7}).encode()
        self._step(STEP_BYTES)
        return encoded


@dataclass
class Client:
    """One connection to a server."""

    port: int
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, body: bytes) -> float:
        """Milliseconds until the last byte of the response."""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        began = time.perf_counter()
        self.writer.writelines((head, body))
        status = await self.reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status
        while size := int(await self.reader.readline(), 16):
            await self.reader.readexactly(size + 2)
        await self.reader.readline()
        return (time.perf_counter() - began) * 1000


async def pull(port: int) -> None:
    """Read new calls every second, as the daemon does, but parse none: the clients need their processor time."""
    after = 0
    while True:
        await asyncio.sleep(PULL_SECONDS)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /flywheel/calls?after=%d HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % after)
        page = await reader.read()  # to the end of the connection
        writer.close()
        numbers = re.findall(rb'"number":(\d+),"request_id"', page)
        after = int(numbers[-1]) if numbers else after


async def measure(ports: dict[str, int], rounds: int, requests: int) -> dict[str, list[list[float]]]:
    """Latencies by server and kind of request, a list for each round."""
    conversations = [Conversation(seed) for seed in range(CLIENTS)]
    clients = {name: [Client(port) for _ in range(CLIENTS)] for name, port in ports.items()}
    for each in (*clients["on"], *clients["off"]):
        await each.connect()
    found: dict[str, list[list[float]]] = {f"{kind} {name}": [] for kind in ("plain", "stream") for name in ports}

    pulling = asyncio.create_task(pull(ports["on"]))

    async def talk(client: Client, bodies: list[bytes], delay: float) -> list[float]:
        await asyncio.sleep(delay)
        return [await client.ask(body) for body in bodies]

    for at in range(rounds + 1):
        for kind in ("plain", "stream"):
            bodies = [[each.next_body(stream=kind == "stream") for _ in range(requests)] for each in conversations]
            # The first round warms up, and each server begins every other one.
            for name in ("on", "off") if at % 2 else ("off", "on"):
                # Not all at the same moment, as agents would.
                told = await asyncio.gather(
                    *(
                        talk(client, own, place * PLAIN_SECONDS / CLIENTS)
                        for place, (client, own) in enumerate(zip(clients[name], bodies, strict=True))
                    )
                )
                if at:
                    found[f"{kind} {name}"].append([each for own in told for each in own])
                await asyncio.sleep(0.3)  # What is still to be written does not disturb the other server.
    pulling.cancel()
    return found


# The sizes


class Load(NamedTuple):
    """Conversations in which each request repeats the one before and adds an answer and a message of so many words.
    With `seeds`, each request has a seed of its own."""

    conversations: int
    turns: int
    tools: int
    words: int
    seeds: bool = False


LOADS: Final = {
    "long": Load(1, 800, 10, 40),
    "tools": Load(5, 60, 60, 150),
    "seeds": Load(20, 40, 10, 150, seeds=True),
}


def calls_of(load: Load) -> Iterator[RecordedCall]:
    words = WORDS.read_text().split()

    def text(source: random.Random, count: int) -> str:
        return " ".join(source.choices(words, k=count))

    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    described = [{"name": f"tool_{at}", "description": text(random.Random(at), 80)} for at in range(load.tools)]
    tools = [{"type": "function", "function": {**each, "parameters": parameters}} for each in described]
    for conversation in range(load.conversations):
        source = random.Random(conversation)
        messages = [{"role": "system", "content": text(source, 300)}]
        for turn in range(load.turns):
            messages.append({"role": "tool" if turn % 2 else "user", "content": text(source, load.words)})
            body = {"model": "agent", "messages": messages, "tools": tools, "temperature": 0.7}
            if load.seeds:
                body["seed"] = source.getrandbits(31)
            answer = {"role": "assistant", "content": text(source, 20)}
            yield RecordedCall(
                f"fw-{conversation}-{turn}",
                "/v1/chat/completions",
                "base",
                status=200,
                is_complete=True,
                request=json.dumps(body).encode(),
                response=json.dumps({"id": "x", "choices": [{"message": answer}]}).encode(),
            )
            messages.append(answer)


def size_of(load: Load, path: Path) -> int:
    """The bytes of a log with these calls, ten in a transaction."""
    calls = calls_of(load)
    with CallLog(path) as log:
        while some := list(itertools.islice(calls, 10)):
            log.append(some)
        return log.live_bytes()


def main() -> None:
    options = measurement.parser("calls", __doc__)
    options.add_argument("--rounds", type=int)
    given = options.parse_args()
    rounds, requests = given.rounds or (2 if given.quick else 20), 2 if given.quick else 4
    before = measurement.machine()
    with measurement.folders(given.dir) as (_, scratch):
        path = scratch / "calls.db"
        with server(path) as (on, recording), server(None) as (off, bare):
            found = asyncio.run(measure({"on": on, "off": off}, rounds, requests))
            spent = {name: sum(process.cpu_times()[:2]) for name, process in (("on", recording), ("off", bare))}
        with CallLog(path) as log, log.reading() as connection:
            state, size = log.state(), log.live_bytes()
            (sent,) = connection.execute("SELECT sum(size) FROM calls").fetchone()
        sizes = {name: size_of(load, scratch / f"{name}.db") for name, load in LOADS.items()}
    asked = (rounds + 1) * 2 * CLIENTS * requests
    result: dict[str, Any] = {}
    for kind in ("plain", "stream"):
        by_round = [[median(one) for one in found[f"{kind} {name}"]] for name in ("on", "off")]
        on_ms, off_ms = ([each for one in found[f"{kind} {name}"] for each in one] for name in ("on", "off"))
        differences = [one - other for one, other in zip(*by_round, strict=True)]
        result |= {
            f"{kind}_ms": round(median(off_ms), 2),
            f"{kind}_overhead_ms": round(median(on_ms) - median(off_ms), 3),
            f"{kind}_overhead_ms_of_rounds": [round(measurement.percentile(differences, at), 2) for at in (0.1, 0.9)],
            f"{kind}_ms_p99": round(measurement.percentile(off_ms, 0.99), 2),
            f"{kind}_overhead_ms_p99": round(
                measurement.percentile(on_ms, 0.99) - measurement.percentile(off_ms, 0.99), 2
            ),
        }
    result = {
        "call_log_overhead_ms": max(result["plain_overhead_ms"], result["stream_overhead_ms"]),
        **result,
        "cpu_ms_a_request_off": round(spent["off"] / asked * 1000, 2),
        "cpu_ms_a_request": round((spent["on"] - spent["off"]) / asked * 1000, 2),
        "recorded": state.newest,
        "asked": asked,
        "dropped": state.dropped,
        "mb_on_disk": round(size / 1e6, 1),
        "mb_sent": round(sent / 1e6, 1),
        **{f"mb_{name}": round(size / 1e6, 3) for name, size in sizes.items()},
    }
    measurement.report(result, before, as_json=given.json)


if __name__ == "__main__":
    main()
