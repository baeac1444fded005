"""What the rows of a trace mean: parsed, put together as a tree, told as replies.

Pure: rows in, entries out. It runs in the daemon for the few traces of every day and in a process of its own while a
long history is read, so it must not import more than it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from flywheel.batch import Entry, entries_of, entry_of, storable
from flywheel.exclusion import TrainedModels
from flywheel.sources.studio.recorded import Attributes
from flywheel.sources.studio.replies import finished_reply, unfinished_reply
from flywheel.sources.studio.row import shown, unpacked
from flywheel.sources.studio.schema import Schema, named
from flywheel.sources.studio.span import Span, SpanKind
from flywheel.sources.studio.trace_tree import Tree
from flywheel.states import SkipReason
from flywheel.trace import DeadRow, Reply, Selection

_BAD_CONTENT = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)
"""What content of a wrong shape raises. It costs its own reply, never the batch."""

_AT_ONCE = 256
"""Replies that become entries together: more save little, and what they were read from is held until then."""


@dataclass(slots=True)
class Told:
    """What traces hold; `kinds` counts the spans of those without an agent."""

    entries: list[Entry] = field(default_factory=list)
    dead: list[DeadRow] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def convert(
    schema: str, traces: Sequence[tuple[Mapping[int, bytes], bool]], selection: Selection, source: str
) -> Told:
    """Tell traces of `source`, each by its packed rows and whether spans are missing that may still come."""
    told = Told()
    known = named(schema)
    replies: list[Reply] = []
    for rows, is_open in traces:
        own, dead = tell(known, rows, selection, is_open=is_open, kinds=told.kinds)
        replies += own
        if len(replies) >= _AT_ONCE:
            _enter(told, replies, source, selection.models)
            replies.clear()
        told.dead += dead
    _enter(told, replies, source, selection.models)
    return told


def _enter(told: Told, replies: Sequence[Reply], source: str, models: TrainedModels) -> None:
    """Replies in the ledger's form; one that has none is dead by itself."""
    try:
        told.entries += entries_of(replies, source, models)
    except _BAD_CONTENT:
        for reply in replies:
            try:
                told.entries.append(entry_of(reply, source, models))
            except _BAD_CONTENT as error:
                why = storable(f"it cannot be written as JSON: {error}")[:2000]
                told.dead.append(DeadRow(0, reply.span_id, reply.trace_id, why, storable(reply.answer)[:500]))


def tell(
    schema: Schema, rows: Mapping[int, bytes], selection: Selection, *, is_open: bool, kinds: Counter[str]
) -> tuple[list[Reply], list[DeadRow]]:
    """The replies and dead rows of one trace."""
    spans: dict[str, Span] = {}
    buried: set[str] = set()
    dead: list[DeadRow] = []
    for rowid in sorted(rows):
        span = schema.read(unpacked(rowid, rows[rowid]))
        if isinstance(span, DeadRow):
            dead.append(span)
            buried.add(span.span_id)
        else:
            spans[span.span_id] = span
    tree = Tree(spans, buried)
    if cyclic := tree.cyclic():
        for span in cyclic:
            dead.append(_dead(span, rows, "its parents form a circle"))
            del spans[span.span_id]
            buried.add(span.span_id)
        tree = Tree(spans, buried)
    if not tree.agents:
        kinds.update(span.kind.value for span in spans.values())
    replies: list[Reply] = []
    for agent in tree.agents:
        try:
            reply = finished_reply(tree, agent, selection)
        except _BAD_CONTENT as error:
            dead.append(_dead(agent, rows, f"its content cannot be read: {error}"))
            continue
        if is_open:
            reply = replace(reply, skip=SkipReason.UNFINISHED, skip_detail="a span above the agent's has not arrived")
        replies.append(reply)
    if tree.missing_agents:
        replies += _missing_agents(tree, selection)
    return replies, dead


def _missing_agents(tree: Tree, selection: Selection) -> Iterator[Reply]:
    for parent, children in tree.missing_agents.items():
        try:
            yield unfinished_reply(tree, parent, children, selection)
        except _BAD_CONTENT:
            # The children are unreadable as well; that the reply existed is all that can be told.
            bare = [replace(child, attributes=Attributes(), kind=SpanKind.OTHER, events=()) for child in children]
            yield unfinished_reply(Tree({span.span_id: span for span in bare}), parent, bare, selection)


def _dead(span: Span, rows: Mapping[int, bytes], error: str) -> DeadRow:
    attributes = unpacked(span.rowid, rows[span.rowid])[5]
    return DeadRow(span.rowid, span.span_id, span.trace_id, storable(error)[:2000], shown(attributes)[:500])
