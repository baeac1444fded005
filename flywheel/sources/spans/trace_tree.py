"""The spans of one trace as a tree: which spans belong to which agent, and each agent's role.

An agent below another agent was called by it as a tool: nested. Agents beside each other below a root that is not an
agent's form a pipeline, and the user sees the answer of its last stage. Two cases look like a pipeline but are not.
Agents that overlap in time are a fan-out. An agent whose input is new, neither the answer of an earlier agent nor
what another one was asked, begins the next turn of a conversation that the application wrapped into one span.

In a trace without an agent's span, the outermost span above the model calls stands for the agent. An agent's span
with neither messages nor model calls of its own stands for the agents right below it, such as those that hand over to
each other in one run of OpenAI's SDK.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from flywheel.records.chat import text_of
from flywheel.records.reprs import ReprError
from flywheel.records.trace import SpanStatus
from flywheel.sources.spans import attributes as at
from flywheel.sources.spans.span import Span, SpanKind, in_order

QUOTED: Final = 24
"""The shortest text that counts as quoted in a user's message. A shorter one ("Paris") may occur by chance."""


class Role(StrEnum):
    ROOT = "root"
    NESTED = "nested"
    STAGE = "stage"
    LAST = "last"


class Placement(Struct, frozen=True):
    """An agent span's role; `asked` is the span whose input is what the user asked."""

    role: Role
    asked: Span


class Tree:
    """`spans` by id. `dead` has the ids of spans that exist but could not be read."""

    def __init__(self, spans: Mapping[str, Span], dead: Collection[str] = ()) -> None:
        self.spans = spans
        ordered = sorted(spans.values(), key=in_order)
        top = ordered[0] if ordered and ordered[0].kind is SpanKind.AGENT and not ordered[0].parent_id else None
        self.is_plain = top is not None and all(
            span.parent_id == top.span_id and span.kind is not SpanKind.AGENT for span in ordered[1:]
        )
        """Whether one agent at the top is the parent of all other spans, as in most traces."""
        self._children: dict[str, list[Span]] = {}
        if self.is_plain:
            self.agents = ordered[:1]
            self._children[ordered[0].span_id] = ordered[1:]
        else:
            self.agents = [span for span in ordered if span.kind is SpanKind.AGENT]
            """The agent spans in the order in which they began."""
            for span in ordered:
                if span.parent_id:
                    self._children.setdefault(span.parent_id, []).append(span)
        self.missing = {
            parent: under for parent, under in self._children.items() if parent not in spans and parent not in dead
        }
        """Parents that are not there, by id, with the spans that name them."""
        self.missing_agents = {
            parent: under
            for parent, under in self.missing.items()
            if any(child.kind not in (SpanKind.AGENT, SpanKind.OTHER) for child in under)
        }
        """Those of them that must be agents: model calls, tools and formatters are below agents only."""
        self._placements: dict[str, Placement] | None = None

    def cyclic(self) -> list[Span]:
        """The spans that are their own ancestors; a plain tree has none."""
        seen: set[str] = set()
        circles: set[str] = set()
        for span in self.spans.values():
            line: dict[str, None] = {}
            above: Span | None = span
            while above is not None and above.span_id not in seen:
                seen.add(above.span_id)
                line[above.span_id] = None
                above = self.spans.get(above.parent_id)
            if above is not None and above.span_id in line:
                way = list(line)
                circles.update(way[way.index(above.span_id) :])
        return [span for span in self.spans.values() if span.span_id in circles]

    def own(self, agent_id: str) -> list[Span]:
        """The spans of one agent in the order in which they began, without those of agents that it called as tools.

        A `reply` that only delegates to its superclass makes two spans of one agent, one right below the other. The
        inner spans belong to both.
        """
        if self.is_plain:
            return self._children[agent_id]
        own, below = self._below(agent_id)
        for agent in below:
            own += self.own(agent.span_id)
        own.sort(key=in_order)
        return own

    def merged(self, agent: Span) -> list[Span]:
        """The agents right below for which an agent's span stands, in the order in which they began."""
        if self.is_plain or at.has_messages(agent):
            return []
        return sorted(self._below(agent.span_id)[1], key=in_order)

    def _below(self, agent_id: str) -> tuple[list[Span], list[Span]]:
        """An agent's own spans, and the agents for which its span stands."""
        agent = self.spans.get(agent_id)
        found: list[Span] = []
        agents: list[Span] = []
        waiting = [(child, False) for child in self._children.get(agent_id, ())]
        seen = {agent_id}
        while waiting:
            span, is_called = waiting.pop()
            if span.span_id in seen:
                continue
            seen.add(span.span_id)
            if span.kind is SpanKind.AGENT:
                if agent is None or span.parent_id != agent_id or not _is_delegated(agent, span):
                    if not is_called:
                        agents.append(span)
                    continue
            else:
                found.append(span)
            is_called = is_called or span.kind is SpanKind.TOOL
            waiting += [(child, is_called) for child in self._children.get(span.span_id, ())]
        # Of a model call within another one, as two instrumentations record it, the inner one has the request itself.
        outer = {span.parent_id for span in found if span.kind is SpanKind.LLM}
        found = [span for span in found if span.kind is not SpanKind.LLM or span.span_id not in outer]
        is_empty = agent is not None and not outer and not at.has_messages(agent)
        return found, agents if is_empty else []

    def callers(self) -> list[Span]:
        """The outermost span above each model call, unless that is a model call or a tool itself."""
        known: dict[str, tuple[Span, bool]] = {}
        tops = [self._above(span, known)[0] for span in self.spans.values() if span.kind is SpanKind.LLM]
        return [span for span in {top.span_id: top for top in tops}.values() if span.kind is SpanKind.OTHER]

    def placement(self, agent: Span) -> Placement:
        """The role of an agent span."""
        if self.is_plain:
            return Placement(Role.ROOT, agent)
        if self._placements is None:
            self._placements = self._placed()
        return self._placements[agent.span_id]

    def _placed(self) -> dict[str, Placement]:
        placed: dict[str, Placement] = {}
        beside: dict[str, list[Span]] = {}
        known: dict[str, tuple[Span, bool]] = {}
        for agent in self.agents:
            top, is_below_agent = self._above(agent, known)
            if is_below_agent or self._below_missing_agent(top, agent):
                placed[agent.span_id] = Placement(Role.NESTED, agent)
            else:
                beside.setdefault(top.parent_id or top.span_id, []).append(agent)
        for agents in beside.values():
            placed |= _pipeline(agents)
        return placed

    def _above(self, span: Span, known: dict[str, tuple[Span, bool]]) -> tuple[Span, bool]:
        """The topmost ancestor, and whether an ancestor is an agent. `known` caches results."""
        line: list[Span] = []
        here = span
        while here.span_id not in known:
            parent = self.spans.get(here.parent_id)
            if parent is None:
                known[here.span_id] = (here, False)
                break
            line.append(here)
            here = parent
        for below in reversed(line):
            top, is_below_agent = known[here.span_id]
            known[below.span_id] = (top, is_below_agent or here.kind is SpanKind.AGENT)
            here = below
        return known[span.span_id]

    def agents_above(self, agent: Span) -> list[Span]:
        """The agents above an agent, the nearest first."""
        found: dict[str, Span] = {}
        here = self.spans.get(agent.parent_id)
        while here is not None and here.span_id not in found:
            found[here.span_id] = here
            here = self.spans.get(here.parent_id)
        return [span for span in found.values() if span.kind is SpanKind.AGENT]

    def _below_missing_agent(self, top: Span, agent: Span) -> bool:
        """Whether an agent that never arrived must be above `agent`."""
        if not top.parent_id or top.parent_id not in self.missing:
            return False
        others = (child for children in self.missing_agents.values() for child in children if child is not top)
        return top.parent_id in self.missing_agents or any(child.started_ns <= agent.started_ns for child in others)


def _is_delegated(agent: Span, below: Span) -> bool:
    """Whether the agent right below is the same agent. A different agent of that name has an id of its own."""
    ids = {at.agent_id(agent), at.agent_id(below)} - {""}
    return len(ids) < 2 and at.agent_name(agent) == at.agent_name(below)


class _Stage(Struct, frozen=True):
    """An agent beside others: its input as roles and texts, and its answer."""

    span: Span
    name: str
    handed: list[tuple[str, str]]
    answer: str

    def follows(self, earlier: _Stage) -> bool:
        """Whether this one continues from what `earlier` answered or was asked."""
        said = earlier.answer
        if not said or earlier.span.ended_ns > self.span.started_ns:
            return False
        if not self.handed:
            # It answers what it has observed: the answer of another agent, or its own user.
            return earlier.name != self.name
        for role, text in self.handed:
            if text == said or ((role == "assistant" or len(said) >= QUOTED) and said in text):
                return True
            if earlier.name != self.name and any(
                asked and (asked == text or (len(asked) >= QUOTED and asked in text)) for _, asked in earlier.handed
            ):
                # A router forwards the same question; a classifier puts its result before it.
                return True
        return False


def _stage(agent: Span) -> _Stage:
    try:
        output = at.agent_output(agent)
        handed = [(str(message.get("role")), _plain(text_of(message))) for message in at.input_messages(agent)]
    except ReprError:
        # Extraction reports it with the reply of this agent.
        return _Stage(agent, at.agent_name(agent), [("user", "")], "")
    answer = _plain(text_of(output)) if output and agent.status is not SpanStatus.ERROR else ""
    return _Stage(agent, at.agent_name(agent), handed, answer)


def _plain(text: str) -> str:
    """A text without the differences that forwarding often makes."""
    return " ".join(text.casefold().split())


def _pipeline(agents: list[Span]) -> dict[str, Placement]:
    """The roles of agents beside each other, given in the order in which they began."""
    stages = [_stage(agent) for agent in agents]
    asked: dict[str, Span] = {}
    went_on: set[str] = set()
    for place, stage in enumerate(stages):
        before = [earlier for earlier in stages[:place] if stage.follows(earlier)]
        went_on |= {earlier.span.span_id for earlier in before}
        asked[stage.span.span_id] = asked[before[0].span.span_id] if before else stage.span
    placed: dict[str, Placement] = {}
    for agent in agents:
        first = asked[agent.span_id]
        role = Role.STAGE if agent.span_id in went_on else Role.ROOT if first is agent else Role.LAST
        placed[agent.span_id] = Placement(role, agent if role is Role.STAGE else first)
    return placed
