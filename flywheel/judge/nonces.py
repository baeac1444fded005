"""The nonces of calls, and whether a reply is that of another one.

A cache or a proxy in between can hand out what was said to somebody else: it is a whole verdict, of another task.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import Final

from flywheel.judge.delimiters import new_nonce

REMEMBERED: Final = 16_384
"""So many of the last calls are known."""
CHECK: Final = re.compile(r"""\bcheck\\?["']\s*:\s*\\?["']([0-9a-f]{16})\b""", re.IGNORECASE)


class Nonces:
    """Draws nonces and remembers them. Thread-safe."""

    def __init__(self) -> None:
        self._last: deque[str] = deque()
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def new(self) -> str:
        nonce = new_nonce()
        with self._lock:
            self._last.append(nonce)
            self._known.add(nonce)
            if len(self._last) > REMEMBERED:
                self._known.discard(self._last.popleft())
        return nonce

    def is_of_another(self, reply: str, nonce: str) -> bool:
        """Whether a reply to the call with this nonce repeats that of another call."""
        given = {match.lower() for match in CHECK.findall(reply)} - {nonce}
        return any(other in self._known for other in given)
