"""A judge that answers after a fixed time and costs next to nothing: `python -m benchmarks.judge_endpoint SECONDS`.

It prints its port and serves until its standard input ends. Every answer is the same; it only counts as a verdict
where the endpoint was asked by a JSON schema, which it is.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CRITERIA: Final = ("correct", "clear", "complete")
NO_NONCE: Final = "0" * 16
_NONCE: Final = re.compile(rb'\\"check\\": \\"([0-9a-f]{16})\\"')
_VERDICT: Final = {
    "criteria": {name: {"reason": "It is so, as the steps show.", "choice": "yes"} for name in CRITERIA}
}
_BODY: Final = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "judge",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": json.dumps({**_VERDICT, "check": NO_NONCE})},
            }
        ],
        "usage": {"prompt_tokens": 400, "completion_tokens": 60, "total_tokens": 460},
    }
).encode()
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY)


def answer_to(request: bytes) -> bytes:
    """The body of the answer to a request, whose nonce it repeats as a verdict has to."""
    nonce = _NONCE.search(request)
    return _BODY.replace(NO_NONCE.encode(), nonce[1]) if nonce else _BODY


class _Connection(asyncio.Protocol):
    """Reads requests by their content-length, and nothing else of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = self._read[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            if len(self._read) < end + 4 + length:
                return
            answer = HEAD + answer_to(self._read[end : end + 4 + length])
            self._read = self._read[end + 4 + length :]
            if self._seconds:
                asyncio.get_running_loop().call_later(self._seconds, self._transport.write, answer)
            else:
                self._transport.write(answer)


@contextmanager
def running(seconds: float) -> Iterator[str]:
    """The endpoint in a process of its own; its base URL."""
    command = [sys.executable, "-m", "benchmarks.judge_endpoint", str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.stdin.close()


async def serve(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(seconds), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
