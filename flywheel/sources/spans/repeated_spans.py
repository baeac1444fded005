"""Divides a trace in which span ids occur more than once: runs with the same trace id, as seeded ids make them.

Within a run, each id occurs once. A span goes to the parent of its own resource, or else to the one that is nearest
in time; of several spans with one id, a parent has the one that fits best. What fits several parents equally well is
left out: it would show in a run what happened in another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from msgspec.structs import replace

from flywheel.records.repeated_ids import SAME_START_NS
from flywheel.records.trace import LATEST_NS
from flywheel.sources.spans.span import Span, in_order

_MARK: Final = "\0"
"""Between a span's id and its start, where an earlier span has the same id."""


class Divided(NamedTuple):
    """The spans of a trace by ids that are unique in it (see `true_id`), and those that are left out."""

    spans: dict[str, Span]
    left_out: list[Span]


def true_id(unique_id: str) -> str:
    """The id that the client gave to a span."""
    return unique_id.partition(_MARK)[0]


def divided(read: Sequence[Span]) -> Divided:
    """The spans of one trace. Of those that are equal, also in their starts, the one of the last row counts."""
    by_id: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(read, key=in_order):
        same = by_id[span.span_id]
        if same and span.started_ns - same[-1].started_ns < SAME_START_NS:
            same[-1] = max(same[-1], span, key=lambda each: each.rowid)
        else:
            same.append(span)
    parents = {
        name: _Parents([replace(span, span_id=f"{name}{_MARK}{span.started_ns}") if at else span
                        for at, span in enumerate(same)])
        for name, same in by_id.items()
    }  # fmt: skip
    result = Divided({}, [])
    for name in by_id:
        best: dict[str, tuple[tuple[bool, int], Span]] = {}
        for span in parents[name].spans:
            above = parents[span.parent_id].fitting(span) if span.parent_id in parents else []
            if len(above) > 1:
                result.left_out.append(span)
                continue
            result.spans[span.span_id] = span
            if above:
                fit = (span.resource != above[0].resource, _distance(span, above[0]))
                if above[0].span_id not in best or fit < best[above[0].span_id][0]:
                    best[above[0].span_id] = fit, span
                # Unless it fits best, its own parent has not arrived.
                result.spans[span.span_id] = replace(span, parent_id=span.parent_id + _MARK)
        for parent_id, (_, span) in best.items():
            result.spans[span.span_id] = replace(span, parent_id=parent_id)
    return result


class _Parents:
    """The spans with one id, in the order in which they began."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        by_resource: defaultdict[str, list[Span]] = defaultdict(list)
        for span in spans:
            by_resource[span.resource].append(span)
        self._of_all = _Times(spans)
        self._of_resource = {resource: _Times(own) for resource, own in by_resource.items() if resource}

    def fitting(self, span: Span) -> list[Span]:
        """The parents that fit a span best: several, where nothing tells them apart."""
        return self._of_resource.get(span.resource, self._of_all).nearest(span)


class _Times:
    """Spans by time. A parent of many runs has many, so that not each is looked at for each child."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._starts = [span.started_ns for span in spans]
        self._last_ends = list(accumulate((span.ended_ns for span in spans), max))
        """The last end among a span and those that began before it."""

    def nearest(self, span: Span) -> list[Span]:
        """The spans to which the start of `span` has the smallest distance."""
        began = bisect_left(self._starts, span.started_ns + SAME_START_NS)
        near = list(self._spans[began : began + 1])
        distance = min((_distance(span, each) for each in near), default=LATEST_NS)
        for at in range(began - 1, -1, -1):
            if span.started_ns - self._last_ends[at] > max(distance, SAME_START_NS - 1):
                break
            near.append(self._spans[at])
            distance = min(distance, _distance(span, self._spans[at]))
        smallest = min(_distance(span, each) for each in near)
        return [each for each in near if _distance(span, each) == smallest]


def _distance(span: Span, parent: Span) -> int:
    """Nanoseconds between the start of a span and the time of a parent; 0 within it."""
    early, late = parent.started_ns - span.started_ns, span.started_ns - parent.ended_ns
    distance = max(early, late)
    return distance if distance >= SAME_START_NS else 0
