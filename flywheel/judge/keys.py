"""A pool of keys, "k1|k2": they take turns, and one that was refused or asked to slow down rests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

REFUSED_SECONDS: Final = 600.0
"""How long a refused key rests while others work: somebody may fill its account."""
SLOW_SECONDS: Final = 5.0
"""How long a key rests that was asked to slow down, while others work."""
LONGEST_SECONDS: Final = 600.0
"""No endpoint's wish keeps a key away for longer: a wrong header must not stop judging for a day."""


@dataclass(slots=True)
class Key:
    """One key. Its place in the pool names it in messages; the secret is in none."""

    place: int
    secret: str = field(repr=False)
    rests_until: float = 0.0
    refused: str = ""


class KeyPool:
    """Keys in turn. Thread-safe."""

    def __init__(self, secrets: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = [Key(place, secret) for place, secret in enumerate(secrets, start=1)]
        self._clock = clock
        self._turn = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def take(self) -> Key | None:
        """The next key that does not rest; None when all do."""
        with self._lock:
            now = self._clock()
            for step in range(len(self._keys)):
                key = self._keys[(self._turn + step) % len(self._keys)]
                if key.rests_until <= now:
                    self._turn = (key.place) % len(self._keys)
                    return key
            return None

    def slow(self, key: Key, seconds: float | None) -> None:
        """The endpoint asked this key to slow down, for `seconds` if it said so."""
        if seconds is None and len(self._keys) == 1:
            return  # whoever retries backs off
        with self._lock:
            rest = min(SLOW_SECONDS if seconds is None else seconds, LONGEST_SECONDS)
            key.rests_until = max(key.rests_until, self._clock() + rest)

    def refuse(self, key: Key, why: str) -> bool:
        """The endpoint refused this key; whether another one may still be tried."""
        with self._lock:
            key.refused = why
            if len(self._keys) > 1:
                key.rests_until = self._clock() + REFUSED_SECONDS
            return any(not other.refused for other in self._keys)

    def worked(self, key: Key) -> None:
        key.refused = ""

    def refusal(self) -> str:
        """Why all keys were refused; "" while one was not."""
        with self._lock:
            return self._keys[-1].refused if all(key.refused for key in self._keys) else ""

    def seconds_to_wait(self) -> float:
        """Until the first key has rested."""
        with self._lock:
            return max(0.0, min(key.rests_until for key in self._keys) - self._clock())
