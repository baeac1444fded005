"""Which calls of a call log resend the whole history of another: its messages, byte for byte, and perhaps more.

Standard library only, like the call log.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence

from flywheel.serving.calls.request_parts import runs


def resending(connection: sqlite3.Connection, histories: Mapping[int, Sequence[int]]) -> dict[int, list[str]]:
    """The request ids of later calls that resend a call, by that call's number. `histories` has the parts of the
    messages of each call, none of them empty."""
    # A history is looked for by its last part.
    by_end: dict[int, list[int]] = defaultdict(list)
    for number, parts in histories.items():
        by_end[parts[-1]].append(number)
    found: dict[int, list[str]] = defaultdict(list)
    query = "SELECT number, request_id, request FROM calls WHERE number > ? ORDER BY number"
    for later, request_id, request in connection.execute(query, (min(histories, default=0),)):
        ends = runs(request)
        if not any(first <= end <= last for first, last in ends for end in by_end):
            continue
        sent = [part for first, last in ends for part in range(first, last + 1)]
        for at, part in enumerate(sent, 1):
            for number in by_end.get(part, ()):
                own = histories[number]
                if number < later and len(own) <= at and sent[at - len(own) : at] == list(own):
                    found[number].append(request_id)
    return found
