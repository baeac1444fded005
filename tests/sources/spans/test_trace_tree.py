"""Trees of any shape: circles are found, and who is below an agent, as if every way up were walked by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.trace import SpanStatus
from flywheel.sources.spans.span import Attributes, Span, SpanKind
from flywheel.sources.spans.trace_tree import Role, Tree

PARENTS = st.lists(st.tuples(st.integers(-1, 11), st.booleans()), min_size=1, max_size=12)
"""Of each span the number of its parent, which may not be there, and whether it is an agent."""


def spans_of(shape: list[tuple[int, bool]]) -> dict[str, Span]:
    return {
        str(number): Span(
            rowid=number,
            span_id=str(number),
            trace_id="t",
            parent_id=str(parent) if 0 <= parent < len(shape) else "",
            name="",
            kind=SpanKind.AGENT if is_agent else SpanKind.OTHER,
            started_ns=number,
            ended_ns=number + 1,
            status=SpanStatus.OK,
            status_message="",
            conversation_id="",
            attributes=Attributes(),
        )
        for number, (parent, is_agent) in enumerate(shape)
    }


def above(spans: dict[str, Span], span: Span) -> list[Span]:
    """All that lies above a span; in a circle each once, itself last."""
    way: list[Span] = []
    here = spans.get(span.parent_id)
    while here is not None and here not in way:
        way.append(here)
        here = spans.get(here.parent_id)
    return way


@given(shape=PARENTS)
def test_circles_and_roles_are_those_of_each_way_up(shape: list[tuple[int, bool]]) -> None:
    spans = spans_of(shape)
    circles = [span for span in spans.values() if span in above(spans, span)]
    assert Tree(spans).cyclic() == circles
    left = {name: span for name, span in spans.items() if span not in circles}
    tree = Tree(left, {span.span_id for span in circles})
    for agent in tree.agents:
        is_below = any(span.kind is SpanKind.AGENT for span in above(left, agent))
        assert (tree.placement(agent).role is Role.NESTED) == is_below
