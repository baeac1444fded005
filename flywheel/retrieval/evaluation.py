"""How well methods find the tool that was called: recall and reciprocal rank, for tools that training has seen and
for others, with paired differences. Arithmetic only; intervals are those of the gate's criteria."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from flywheel.retrieval.pairs import Pair
from flywheel.retrieval.tool_index import DEPTH, Method, Ranking
from flywheel.training.gate.intervals import CONFIDENCE, MetricValue, Paired, compare_criterion, summarise

CUTOFFS: Final = (1, 5, 10)
MRR: Final = "mrr"
"""The mean reciprocal rank; a tool that is not among the first `DEPTH` counts 0."""
METRICS: Final = (*(f"recall@{k}" for k in CUTOFFS), MRR)
NEW: Final = "encoder"
BASE: Final = "base"
BASELINES: Final = (BASE, "bm25", f"{BASE} + bm25")
SEEN: Final = "seen"
UNSEEN: Final = "unseen"


@dataclass(frozen=True, slots=True)
class Measured:
    """A method on pairs: `ranking` of the tools, and the `vectors` of the pairs' queries, of shape (pairs,
    dimensions), if it needs them."""

    ranking: Ranking
    vectors: np.ndarray | None = None


class Vectors(NamedTuple):
    """What an encoder makes of tools and of the pairs' queries; of shape (texts, dimensions)."""

    tools: np.ndarray
    queries: np.ndarray


def methods_of(texts: Sequence[str], encoders: Mapping[str, Vectors]) -> dict[str, Measured]:
    """BM25, and each encoder alone and fused with it, by name."""
    found = {}
    for name, (tools, queries) in encoders.items():
        found[name] = Measured(Ranking(texts, Method.ENCODER, tools), queries)
        found[f"{name} + {Method.BM25}"] = Measured(Ranking(texts, Method.FUSION, tools), queries)
    return {**found, Method.BM25.value: Measured(Ranking(texts, Method.BM25))}


def evaluate(
    pairs: Sequence[Pair],
    names: Sequence[str],
    methods: Mapping[str, Measured],
    trained: Collection[str],
    *,
    against: str,
    seed: int,
) -> dict[str, Any]:
    """The report, by group of tools (`seen` and `unseen`): the number of pairs, conversations and tools, the metrics
    of each method, and how much the method `against` is better than each other.

    All tools are ranked for each pair, those of both groups. `names` are in the order of the rankings' texts,
    `trained` the tools that training has seen. Intervals are by conversation.
    """
    values = {method: [_metrics(_rank(each, place, pair, names)) for place, pair in enumerate(pairs)]
              for method, each in methods.items()}  # fmt: skip
    report: dict[str, Any] = {}
    for group in (SEEN, UNSEEN):
        places = [place for place, pair in enumerate(pairs) if (pair.tool in trained) == (group == SEEN)]
        report[group] = {
            "pairs": len(places),
            "conversations": len({pairs[place].conversation for place in places}),
            "tools": len({pairs[place].tool for place in places}),
            "methods": {
                method: {metric: _summary(pairs, values[method], metric, places, seed) for metric in METRICS}
                for method in methods
            },
            "differences": {
                method: {
                    metric: _difference(pairs, values[against], values[method], metric, places, seed)
                    for metric in METRICS
                }
                for method in methods
                if method != against
            },
        }
    return report


def _rank(method: Measured, place: int, pair: Pair, names: Sequence[str]) -> int | None:
    """The rank of the pair's tool, from 1; those that are as right are taken out. None beyond `DEPTH`."""
    vector = None if method.vectors is None else method.vectors[place]
    best = method.ranking.best(pair.query, vector, DEPTH)
    order = [name for name in (names[position] for position in best) if name not in pair.beside]
    return order.index(pair.tool) + 1 if pair.tool in order else None


def _metrics(rank: int | None) -> dict[str, float]:
    found = {f"recall@{k}": float(rank is not None and rank <= k) for k in CUTOFFS}
    return {**found, MRR: 0.0 if rank is None else 1 / rank}


Values = Sequence[Mapping[str, float]]


def _summary(
    pairs: Sequence[Pair], values: Values, metric: str, places: Sequence[int], seed: int
) -> dict[str, float | None]:
    measured = [MetricValue(pairs[place].id, values[place][metric], pairs[place].conversation) for place in places]
    found = summarise(measured, confidence=CONFIDENCE, seed=seed)
    return {"mean": found.mean, "lower": found.lower, "upper": found.upper}


def _difference(
    pairs: Sequence[Pair], ours: Values, theirs: Values, metric: str, places: Sequence[int], seed: int
) -> dict[str, float | None]:
    paired = [
        Paired(pairs[place].id, (ours[place][metric],), (theirs[place][metric],), pairs[place].conversation)
        for place in places
    ]
    found = compare_criterion(metric, paired, takes_away=False, confidence=CONFIDENCE, seed=seed)
    figures = {"mean": found.gain, "lower": found.lower, "upper": found.upper}
    return {**(figures if paired else dict.fromkeys(figures))}


def not_better(report: Mapping[str, Any]) -> str:
    """Why a trained encoder is not kept; empty if it is better than each of `BASELINES` on unseen tools: if the
    interval of each difference of the reciprocal rank is above 0. As all must be, no level is corrected."""
    group = report[UNSEEN]
    if not group["pairs"]:
        return "no held-out conversation calls a tool that training has not seen"
    for method in BASELINES:
        found = group["differences"][method][MRR]
        if found["lower"] <= 0:
            reach = f"{found['mean']:+.3f}, {found['lower']:+.3f} to {found['upper']:+.3f}"
            return f"on unseen tools it is not shown to be better than {method} (reciprocal rank {reach})"
    return ""
