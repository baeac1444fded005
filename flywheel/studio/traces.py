"""The traces that are still growing, and when their replies are done.

Spans arrive when they end, children before parents, a trace in several commits. A trace is whole when every parent
that its spans name is there; whole and quiet, it closes and its replies are told. One that stays incomplete for too
long is given up: what is there is told, an agent span that never came as unfinished. This module never touches the
database: the reader brings the spans, and looks up the parents that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from flywheel.config import IngestSettings
from flywheel.states import SkipReason
from flywheel.studio.replies import finished_reply, unfinished_reply
from flywheel.studio.tree import Tree
from flywheel.trace import DeadRow, Reply, Span, SpanKind

_BAD_CONTENT = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)
"""What content of a wrong shape raises. It costs its own reply, never the batch."""

FAR_ROWS = 5_000
"""While a long history is read, a trace is not given up within so many rows of its last one: more may follow."""


@dataclass(slots=True)
class _Open:
    """A growing trace. `earlier` are spans dealt with in an earlier pass, `buried` unreadable ones, `told` unfinished
    replies already reported, `asked` parents already looked up, `coming` those of them in rows not read yet."""

    first_rowid: int
    seen_ns: int
    last_rowid: int = 0
    ended_ns: int = 0
    spans: dict[str, Span] = field(default_factory=dict)
    earlier: set[str] = field(default_factory=set)
    buried: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    coming: set[str] = field(default_factory=set)

    def missing(self) -> set[str]:
        return {
            span.parent_id
            for span in self.spans.values()
            if span.parent_id and span.parent_id not in self.spans and span.parent_id not in self.buried
        }

    def quiet_ns(self, now_ns: int) -> int:
        """How long nothing ended or arrived. A client's clock that is ahead must not keep a trace open."""
        return max(0, now_ns - min(self.ended_ns, self.seen_ns))


@dataclass(frozen=True, slots=True)
class Told:
    """What closing traces brought."""

    replies: tuple[Reply, ...] = ()
    dead: tuple[DeadRow, ...] = ()


class OpenTraces:
    """The growing traces of one source."""

    def __init__(self, settings: IngestSettings) -> None:
        self._settings = settings
        self._abandon_ns = int(settings.abandon_seconds * 1e9)
        self._open: dict[str, _Open] = {}
        self._closed: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, span: Span, now_ns: int) -> None:
        trace = self._open.setdefault(span.trace_id, _Open(span.rowid, now_ns))
        trace.spans[span.span_id] = span
        trace.ended_ns = max(trace.ended_ns, span.ended_ns)
        trace.seen_ns = now_ns
        trace.last_rowid = span.rowid

    def unknown_parents(self, now_ns: int, read: int, *, more: bool) -> dict[str, str]:
        """Parents that have not arrived and were not looked up yet, each with its trace.

        `read` is the last row that was read; while there are `more`, only those matter that would be given up.
        """
        return {
            parent: trace_id
            for trace_id, trace in self._open.items()
            if not more or self._is_stale(trace, now_ns, read, more)
            for parent in trace.missing() - trace.asked
        }

    def _is_stale(self, trace: _Open, now_ns: int, read: int, more: bool) -> bool:
        far = not more or read - trace.last_rowid >= FAR_ROWS
        return far and trace.quiet_ns(now_ns) >= self._abandon_ns

    def learn(self, asked: dict[str, str], found: Iterable[Span | DeadRow], read: int) -> None:
        """The answer to `unknown_parents`: rows that were dealt with in an earlier pass, or lie behind `read`."""
        for parent, trace_id in asked.items():
            self._open[trace_id].asked.add(parent)
        for row in found:
            trace = self._open[asked[row.span_id]]
            if row.rowid > read:
                trace.coming.add(row.span_id)
            elif isinstance(row, Span):
                trace.spans[row.span_id] = row
                trace.earlier.add(row.span_id)
            else:
                trace.buried.add(row.span_id)

    def resume_after(self, read: int) -> int:
        """The row to resume after when everything up to `read` was read.

        It lies before every open trace and in the middle of no closed one: a trace of which only the end is read
        again would look different (an interrupted reply is told by its last model call).
        """
        place = min((trace.first_rowid - 1 for trace in self._open.values()), default=read)
        for first, last in sorted(self._closed, reverse=True):
            if first <= place < last:
                place = first - 1
        self._closed = [(first, last) for first, last in self._closed if last > place]
        return place

    def close(self, now_ns: int, read: int, *, more: bool, final: bool) -> Told:
        """Tell what is done.

        `final` does not wait for whole traces to settle and, when there are no `more` rows to read, tells the
        incomplete ones as unfinished; these stay open, so that a span that still comes is told properly.
        """
        replies: list[Reply] = []
        dead: list[DeadRow] = []
        settle_ns = 0 if final else int(self._settings.settle_seconds * 1e9)
        for trace_id, trace in list(self._open.items()):
            missing = trace.missing()
            if missing:
                done = self._is_stale(trace, now_ns, read, more) and not missing & trace.coming
            else:
                done = trace.quiet_ns(now_ns) >= settle_ns
            if done:
                self._tell(trace, replies, dead)
                self._closed.append((trace.first_rowid, trace.last_rowid))
                del self._open[trace_id]
            elif missing and final and not more:
                replies += self._unfinished(trace)
        return Told(tuple(replies), tuple(dead))

    def _tell(self, trace: _Open, replies: list[Reply], dead: list[DeadRow]) -> None:
        for span in Tree(trace.spans, trace.buried).cyclic():
            dead.append(_dead(span, "its parents form a circle"))
            del trace.spans[span.span_id]
            trace.buried.add(span.span_id)
        tree = Tree(trace.spans, trace.buried)
        for agent in tree.agents():
            if agent.span_id in trace.earlier:
                continue
            try:
                replies.append(finished_reply(tree, agent, self._settings))
            except _BAD_CONTENT as error:
                dead.append(_dead(agent, f"its content cannot be read: {error}"))
        replies += (reply for reply in _missing_agents(tree) if reply.span_id not in trace.told)

    def _unfinished(self, trace: _Open) -> Iterator[Reply]:
        """What an incomplete trace holds, each told once."""
        tree = Tree(trace.spans, trace.buried)
        for agent in tree.agents():
            if agent.span_id in trace.earlier | trace.told:
                continue
            trace.told.add(agent.span_id)
            try:
                reply = finished_reply(tree, agent, self._settings)
            except _BAD_CONTENT:
                # It is told as dead when its trace closes.
                continue
            yield replace(reply, skip=SkipReason.UNFINISHED, skip_detail="a span above the agent's has not arrived")
        for reply in _missing_agents(tree):
            if reply.span_id not in trace.told:
                trace.told.add(reply.span_id)
                yield reply


def _missing_agents(tree: Tree) -> Iterator[Reply]:
    for parent, children in tree.missing_agents.items():
        try:
            yield unfinished_reply(tree, parent, children)
        except _BAD_CONTENT:
            # The children are unreadable as well; that the reply existed is all that can be told.
            bare = [replace(child, attributes={}, kind=SpanKind.OTHER, events=()) for child in children]
            yield unfinished_reply(Tree({span.span_id: span for span in bare}), parent, bare)


def _dead(span: Span, error: str) -> DeadRow:
    return DeadRow(span.rowid, span.span_id, span.trace_id, error[:2000], repr(span.attributes)[:500])
