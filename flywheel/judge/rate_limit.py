"""How many calls may be in flight: as many as asked for, fewer while the endpoint wants fewer.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): a round of answers lets in one more, a refusal for
speed halves them. Refusals of calls that began before the last decrease are echoes of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

BACK_OFF: Final = 0.5
LOOK_SECONDS: Final = 0.1
"""How often somebody who waits for a place looks whether to stop."""


@dataclass(frozen=True, slots=True)
class Place:
    """A call in flight, from when on."""

    since: float


class ConcurrencyLimit:
    """Places for calls, between 1 and `most`. Thread-safe."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._limit = float(most)
        self._taken = 0
        self._last_cut = float("-inf")
        self._clock = clock
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        return int(self._limit)

    def enter(self, stop: threading.Event) -> Place | None:
        """Wait for a place; None when it is time to stop."""
        with self._changed:
            while self._taken >= self.limit:
                if stop.is_set():
                    return None
                self._changed.wait(LOOK_SECONDS)
            self._taken += 1
            return Place(self._clock())

    def leave(self, place: Place, *, throttled: bool | None) -> None:
        """Give the place back. `throttled` is None when the answer said nothing about speed."""
        with self._changed:
            self._taken -= 1
            if throttled and place.since > self._last_cut:
                self._limit = max(1.0, self._limit * BACK_OFF)
                self._last_cut = self._clock()
            elif throttled is False and self._limit < self.most:
                self._limit = min(float(self.most), self._limit + 1.0 / self._limit)
            self._changed.notify_all()


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


MINUTE = 60.0


class RateLimiter:
    """A rate per minute, or none. Thread-safe. Turns are evenly spaced, so that there are no bursts to refuse."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds_each = MINUTE / per_minute if per_minute else 0.0
        self._clock = clock
        self._free_at = float("-inf")
        self._lock = threading.Lock()

    def reserve(self, amount: float = 1.0) -> float:
        """Take the next turn for so much; seconds to wait before using it."""
        if not self._seconds_each:
            return 0.0
        with self._lock:
            now = self._clock()
            turn = max(now, self._free_at)
            self._free_at = turn + amount * self._seconds_each
            return turn - now

    def correct(self, difference: float) -> None:
        """It was so much more (or less) than was reserved."""
        if self._seconds_each:
            with self._lock:
                self._free_at += difference * self._seconds_each
