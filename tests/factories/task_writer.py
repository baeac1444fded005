"""A model in this process that writes tasks about passages, rightly or not."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

from flywheel.judge.prompt import parse_sections
from tests.factories.judge_faults import chat_completion
from tests.factories.judge_server import LONGEST_SECONDS
from tests.factories.local_server import JsonHandler, LocalServer

Draft = dict[str, Any]


def about(passage: str, number: int) -> Draft:
    """A right draft: its question and its quote are a line of the passage."""
    lines = [line for line in passage.splitlines() if line.strip()]
    line = lines[number % len(lines)]
    return {"question": f"What about {line}?", "answer": f"This: {line}", "quotes": [line]}


class WriterServer(LocalServer):
    """A context manager; `base_url` is what configurations want. It plays `behaviours` in their order, and the last
    one from then on: `good`, the status of an error, `wrong quote`, `malformed`, `close`, or a text that it says.
    It answers `at_once` calls, and the others after `let_go`."""

    def __init__(
        self, *behaviours: str, write: Callable[[str, int], Draft] = about, at_once: float = math.inf
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.passages: Counter[str] = Counter()
        self.write = write
        self.behave(*behaviours)
        self._lock = threading.Lock()
        self._released = threading.Event()
        server = self

        class Handler(JsonHandler):
            def post(self, request: dict[str, Any]) -> None:
                passage = parse_sections(request["messages"][-1]["content"])["PASSAGE"]
                with server._lock:
                    server.requests.append(request)
                    number = server.passages[passage]
                    server.passages[passage] += 1
                    behaviour = next(server._behaviours)
                    is_held = len(server.requests) > at_once
                if is_held:
                    server._released.wait(LONGEST_SECONDS)
                draft = server.write(passage, number)
                if behaviour.isdigit():
                    self.send(int(behaviour), {"error": {"message": "scripted"}}, {"retry-after": "0.01"})
                elif behaviour == "close":
                    self.close_connection = True
                else:
                    if behaviour == "wrong quote":
                        draft["quotes"].append("This is nowhere.")
                    texts = {"good": json.dumps(draft), "wrong quote": json.dumps(draft), "malformed": "I cannot."}
                    self.send(200, chat_completion(texts.get(behaviour, behaviour)))

        super().__init__(Handler)

    @property
    def calls(self) -> int:
        return len(self.requests)

    def let_go(self) -> None:
        """Answer whoever was held, and nobody is held any more."""
        self._released.set()

    def __exit__(self, *error: Any) -> None:
        self.let_go()
        super().__exit__(*error)

    def behave(self, *behaviours: str) -> None:
        self._behaviours: Iterator[str] = chain(behaviours[:-1], repeat(behaviours[-1] if behaviours else "good"))
