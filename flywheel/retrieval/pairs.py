"""Pairs of a conversation so far and the tool that was called next with success, from judged traces; their split by
tool, and hard negatives."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from flywheel.records.similarity import jaccard, words
from flywheel.records.states import ACCEPTED, Split
from flywheel.records.task import TaskLine, conversation_key, split_of, trace_parts
from flywheel.records.tool_calls import FINISH_FUNCTIONS, calls_in, functions_by_name
from flywheel.retrieval.texts import encoded_query, query_texts, tool_text
from flywheel.store.kernel.database import Store
from flywheel.store.views import task_list

PAGE: Final = 200
"""Tasks that are read in one transaction."""
TRAINED_TOOLS: Final = 0.8
"""The share of tools that training may see. The others show how the encoder does on tools that are added later."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A call that returned a result that is no error.

    Attributes:
        query: The conversation before the call, see `query_texts`.
        beside: The other tools that were called with success in the same step: as right as `tool`.
        offered: The names of the tools that the task offers.
    """

    id: str
    query: tuple[str, ...]
    tool: str
    conversation: str
    beside: frozenset[str]
    offered: frozenset[str]


@dataclass(slots=True)
class Calls:
    """What tasks show of tools.

    Attributes:
        pairs: By the split of their conversation.
        tools: The text of each offered tool, as the task that was added last defines it.
        called: The names that each conversation calls anywhere, with success or not.
    """

    pairs: dict[Split, list[Pair]] = field(default_factory=lambda: {split: [] for split in Split})
    tools: dict[str, str] = field(default_factory=dict)
    called: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, line: TaskLine, split: Split) -> None:
        """Count a task. Calls of finish functions are answers. A tool that is called and not offered has no text."""
        parts, about = trace_parts(line), line["metadata"]
        functions = functions_by_name(parts.tools)
        offered = frozenset(functions.keys() - FINISH_FUNCTIONS)
        self.tools.update((name, tool_text(functions[name])) for name in functions if name in offered)
        conversation = conversation_key(about["conversation_id"], about["trace_id"])
        prompt: list[dict[str, object]] = list(line["prompt"])
        calls = calls_in(parts.steps, parts.errors)
        self.called[conversation].update(call.name for call in (*calls_in(prompt), *calls))
        following = iter(calls)
        for number, step in enumerate(parts.steps):
            made = step.get("tool_calls")
            own = [next(following) for _ in made] if isinstance(made, list) else []
            right = {
                call.name for call in own if call.name in offered and call.result is not None and not call.failed
            }
            query = query_texts([*prompt, *parts.steps[:number]])
            for name in sorted(right) if query else ():
                key = f"{line['task_id']}:{number}:{name}"
                self.pairs[split].append(Pair(key, query, name, conversation, frozenset(right - {name}), offered))


async def accepted_calls(store: Store, target: str | None) -> Calls:
    """The tool calls of the accepted tasks, all or those of one target."""
    calls = Calls()
    for split in Split:
        after = 0
        while ids := await store.read(task_list.next_ids, ACCEPTED, (split,), target, after=after, limit=PAGE):
            for one in await store.read(task_list.with_verdicts, ids):
                calls.add(one.line, split)
            after = ids[-1]
    return calls


def trained_tools(names: Iterable[str], seed: int) -> frozenset[str]:
    """The tools that training may see, by a hash of their names: it does not change when tools are added."""
    return frozenset(
        name for name in names if split_of(name, name, train_ratio=TRAINED_TOOLS, seed=seed) is Split.TRAIN
    )


def training_rows(calls: Calls, trained: frozenset[str], negatives: int, seed: int) -> list[dict[str, str]]:
    """The texts `anchor`, `positive`, and `negative_1`, … of each pair of the training split whose tool is in
    `trained`; nothing else is used. Each row has the same number of negatives: at most `negatives`, and fewer if a
    row has no more. The same calls and seed give the same rows.

    Half of the negatives were offered, the others have the nearest names; no conversation has called its own
    negatives. Where these are too few, other tools complete them.
    """
    drawn = random.Random(seed)
    names = sorted(trained & calls.tools.keys())
    near = _NearNames(names)
    found: list[tuple[Pair, list[str]]] = []
    for pair in calls.pairs[Split.TRAIN]:
        if pair.tool in trained:
            right, called = calls.tools[pair.tool], calls.called[pair.conversation]
            fit = [name for name in names if name not in called and calls.tools[name] != right]
            offered = [name for name in fit if name in pair.offered]
            hard = drawn.sample(offered, min(negatives // 2, len(offered)))
            fitting = frozenset(fit)
            rest = drawn.sample(fit, min(negatives, len(fit)))
            nearest = (name for name in near.of(pair.tool) if name in fitting)
            found.append((pair, list(dict.fromkeys((*hard, *nearest, *rest)))[:negatives]))
    width = min((len(chosen) for _, chosen in found), default=0)
    return [
        {
            "anchor": encoded_query(pair.query),
            "positive": calls.tools[pair.tool],
            **{f"negative_{place}": calls.tools[name] for place, name in enumerate(chosen[:width], 1)},
        }
        for pair, chosen in found
    ]


class _NearNames:
    """The tools whose names share words with that of another, the nearest first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._words = {name: words(name) for name in names}
        self._known: dict[str, list[str]] = {}

    def of(self, tool: str) -> list[str]:
        if tool not in self._known:
            own = self._words[tool]
            near = {name: jaccard(own, theirs) for name, theirs in self._words.items() if own & theirs}
            self._known[tool] = sorted(near, key=lambda name: (-near[name], name))
        return self._known[tool]
