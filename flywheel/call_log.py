"""Calls of a model as `flywheel serve` records them. Standard library only, because the server imports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One request and its response, as bytes.

    - `version`: the adapter that answered, or `base`. `credential`: a short hash of the Authorization header, empty
      without one. `retry`: the client's count of repetitions.
    - `status`: of the HTTP response, 0 if none began. `is_complete`: its last byte was sent. `media_type`: of the
      response. Times are nanoseconds since 1970.
    """

    request_id: str
    path: str
    version: str
    credential: str
    retry: int
    started_ns: int
    ended_ns: int
    status: int
    is_complete: bool
    media_type: str
    request: bytes
    response: bytes
