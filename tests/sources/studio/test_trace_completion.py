"""A trace is complete when its parents are there, it has been quiet, and its calls were pulled or are too late."""

from __future__ import annotations

from copy import deepcopy

from flywheel.sources.studio.schema import SCHEMAS
from flywheel.sources.studio.trace_completion import OpenTrace, TraceCompletion
from tests.cases import for_each

ENDED = 1_700_000_000 * 10**9
COMPLETION = TraceCompletion(SCHEMAS["generation 2"], settle_ns=5, abandon_ns=600, calls_wait_ns=60)
AWAITING = TraceCompletion(
    COMPLETION.schema, 5, 600, 60, call_sizes=lambda ids: {each: 1 for each in ids if each != "late"}
)


def trace(*calls: str, parent: bytes | None = b"agent") -> OpenTrace:
    return OpenTrace(
        "t",
        seen_ns=ENDED + 1,
        ids={1: (b"call", parent), 2: (b"agent", None)},
        ends=[str(ENDED).encode()],
        missing_calls=frozenset(calls),
    )


ORPHAN = trace(parent=b"away")


@for_each(
    ("completion", "seen", "quiet_ns", "is_complete"),
    [
        (COMPLETION, trace(), 4, False),
        (COMPLETION, trace(), 5, True),
        (COMPLETION, ORPHAN, 599, False),
        (COMPLETION, ORPHAN, 600, True),
        (COMPLETION, trace("late"), 5, True),
        (AWAITING, trace("late"), 4, False),
        (AWAITING, trace("there", "late"), 5, False),
        (AWAITING, trace("there"), 5, True),
        (AWAITING, trace("there", "late"), 60, True),
    ],
)
def test_a_trace_is_decided_without_changing_it(
    completion: TraceCompletion, seen: OpenTrace, quiet_ns: int, is_complete: bool
) -> None:
    before = deepcopy(seen)
    assert completion.is_complete(seen, ENDED + quiet_ns) is is_complete
    for each in (seen, before):
        each.ended_ns(completion.schema)  # the times of ends are parsed when they are first needed
    assert seen == before


def test_a_trace_without_its_parent_is_not_given_up_while_its_rows_may_follow() -> None:
    assert not COMPLETION.is_complete(ORPHAN, ENDED + 600, is_near=True)
    assert COMPLETION.is_complete(trace(), ENDED + 600, is_near=True)


@for_each(("open_trace", "due_ns"), [(trace(), 5), (trace("late"), 60), (ORPHAN, 600)])
def test_a_trace_is_due_when_it_will_be_complete(open_trace: OpenTrace, due_ns: int) -> None:
    assert AWAITING.due_ns(open_trace) == ENDED + due_ns
