"""What limits the calls to a model: rates, calls in flight, and keys, of which some rest."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from flywheel.system.heartbeat import beat
from flywheel.system.http_client import CallError

T = TypeVar("T")
log = logging.getLogger(__name__)

DECREASE: Final = 0.5
POLL_SECONDS: Final = 0.1
"""How often a thread that waits for its turn checks whether to stop."""
REJECTED_SECONDS: Final = 600.0
"""How long a rejected key rests while others work: its account may be refilled."""
THROTTLED_SECONDS: Final = 5.0
"""How long a throttled key rests while others work."""
MAX_REST_SECONDS: Final = 600.0
"""Upper bound of a requested delay: a wrong header must not stop judging for a day."""

KEY_REJECTED: Final = frozenset({401, 402, 403})
MODERATION: Final = re.compile(r"moderat|flagged|content.?(filter|polic|manag)", re.I)
"""The endpoint rejects the text, in some cases with the status code of a wrong key."""
INVALID_KEY: Final = re.compile(
    r"\b(?:invalid|incorrect|wrong|expired|missing|revoked) (?:\w+ )?(?:api[ _-]?key|token(?! (?:id|count|at|in)\b))",
    re.I,
)
"""How some endpoints report a wrong key with status 400, where others answer 401."""


@dataclass(slots=True)
class RateLimiter:
    """A rate per minute, or no limit. Turns are evenly spaced, which avoids bursts. Thread-safe."""

    per_minute: int | None
    clock: Callable[[], float] = time.monotonic
    _free_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reserve(self, amount: float = 1.0) -> float:
        """Take the next turn for this amount; returns the seconds to wait before using it."""
        if not self.per_minute:
            return 0.0
        with self._lock:
            now = self.clock()
            turn = max(now, self._free_at)
            self._free_at = turn + amount * 60.0 / self.per_minute
            return turn - now

    def correct(self, difference: float) -> None:
        """Adjust a reservation: `difference` was used beyond it. Negative values give the rest back."""
        if self.per_minute:
            with self._lock:
                self._free_at += difference * 60.0 / self.per_minute


class ConcurrencyLimit:
    """Adaptive limit on calls in flight, between 1 and `maximum`. Thread-safe.

    Additive increase, multiplicative decrease (Chiu and Jain, 1989): a throttled call (429) halves the limit, a round
    of answered calls raises it by one. Throttled calls that began before the last decrease do not count again.

    `limit` is fractional; its whole part applies.
    """

    def __init__(self, maximum: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = float(maximum)
        self._maximum = maximum
        self._in_flight = 0
        self._decreased_at = float("-inf")
        self._clock = clock
        self._changed = threading.Condition()

    def acquire(self, stop: threading.Event) -> float | None:
        """Wait until a call may begin. Returns the time at which it begins, or None when `stop` is set."""
        with self._changed:
            while self._in_flight >= int(self.limit):
                if stop.is_set():
                    return None
                self._changed.wait(POLL_SECONDS)
            self._in_flight += 1
            return self._clock()

    def release(self, began: float, *, throttled: bool | None) -> None:
        """The call that began at that time ended. `throttled` is None when its outcome says nothing about load."""
        with self._changed:
            self._in_flight -= 1
            if throttled and began > self._decreased_at:
                self.limit = max(1.0, self.limit * DECREASE)
                self._decreased_at = self._clock()
            elif throttled is False:
                self.limit = min(float(self._maximum), self.limit + 1.0 / self.limit)
            self._changed.notify_all()


@dataclass(slots=True)
class Key:
    """One key. `place` is its position in the pool, from 1; `rejection` how the endpoint rejected it, if it did."""

    place: int
    secret: str = field(repr=False)
    rests_until: float = 0.0
    rejection: CallError | None = None


@dataclass(slots=True)
class KeyPool:
    """Keys in turn, for example from "k1|k2". A key that was rejected or throttled rests. Thread-safe."""

    keys: list[Key]
    clock: Callable[[], float] = time.monotonic
    _turn: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attempt(self, call: Callable[[Key], T], stop: threading.Event, longest: float, endpoint: str) -> T:
        """One attempt, with as many keys as it takes to find one that works. Raises CallError."""
        for left in reversed(range(len(self.keys))):
            key = self.take(stop, longest)
            try:
                found = call(key)
            except CallError as error:
                if error.status == 400 and INVALID_KEY.search(str(error)):
                    error.status = 401
                if error.status == 429 or error.retry_after is not None:
                    self.throttle(key, error.retry_after)
                is_rejected = error.status in KEY_REJECTED and not MODERATION.search(str(error))
                if is_rejected and not self.reject(key, error) and len(self.keys) > 1:
                    raise self._all_rejected(error) from error
                if not left or not (is_rejected or error.status == 429):
                    raise
                log.warning("key %d of %d for %s is paused: %s", key.place, len(self.keys), endpoint, error)
            else:
                key.rejection = None
                return found
        raise AssertionError("a pool has at least one key")

    def _all_rejected(self, last: CallError) -> CallError:
        return CallError(f"{last}, and so for each of {len(self.keys)} keys", status=last.status)

    def take(self, stop: threading.Event, longest: float) -> Key:
        """The next key that does not rest, after a wait of at most `longest` seconds for the first of them.

        Raises CallError when the wait is longer, when `stop` is set, and when all keys were rejected.
        """
        while True:
            with self._lock:
                now = self.clock()
                for key in self.keys[self._turn :] + self.keys[: self._turn]:
                    if key.rests_until <= now:
                        self._turn = key.place % len(self.keys)
                        return key
                wait = min(key.rests_until for key in self.keys) - now
                if all(key.rejection for key in self.keys) and (last := self.keys[-1].rejection):
                    raise self._all_rejected(last)
            beat(wait)
            if wait > longest:
                raise CallError(f"it requested a delay of {wait:.0f} s", final=True)
            if stop.wait(wait):
                raise CallError("judging stops", final=True)

    def throttle(self, key: Key, seconds: float | None) -> None:
        """Let a throttled key rest, for `seconds` if the endpoint requested a delay."""
        if seconds is None and len(self.keys) == 1:
            return  # the retries back off
        with self._lock:
            rest = min(THROTTLED_SECONDS if seconds is None else seconds, MAX_REST_SECONDS)
            key.rests_until = max(key.rests_until, self.clock() + rest)

    def reject(self, key: Key, rejection: CallError) -> bool:
        """Let a rejected key rest; returns whether another key was not rejected."""
        with self._lock:
            key.rejection = rejection
            if len(self.keys) > 1:
                key.rests_until = self.clock() + REJECTED_SECONDS
            return any(not other.rejection for other in self.keys)
