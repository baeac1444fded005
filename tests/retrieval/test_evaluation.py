"""What evaluation counts, and when a trained encoder is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flywheel.retrieval.evaluation import BASELINES, METRICS, MRR, Vectors, evaluate, methods_of, not_better
from flywheel.retrieval.pairs import Pair

NAMES = ["apple", "pear", "plum", "cherry"]


def pair(number: int, tool: str, query: str, *, beside: frozenset[str] = frozenset(), conversation: str = "") -> Pair:
    return Pair(f"p{number}", (query,), tool, conversation or f"c{number}", beside, frozenset(NAMES))


def test_ranks_are_among_all_tools_and_groups_are_apart() -> None:
    pairs = [
        pair(0, "apple", "apple"),
        pair(1, "pear", "apple apple pear"),
        pair(2, "plum", "nothing", conversation="c1"),
        pair(3, "cherry", "cherry"),
    ]
    report = evaluate(pairs, NAMES, methods_of(NAMES, {}), {"apple", "pear", "plum"}, against="bm25", seed=1)
    seen, unseen = report["seen"], report["unseen"]
    assert (seen["pairs"], seen["conversations"], seen["tools"]) == (3, 2, 3)
    assert (unseen["pairs"], unseen["conversations"], unseen["tools"]) == (1, 1, 1)
    means = {metric: seen["methods"]["bm25"][metric]["mean"] for metric in METRICS}
    assert means == pytest.approx({"recall@1": 1 / 3, "recall@5": 2 / 3, "recall@10": 2 / 3, MRR: (1 + 1 / 2) / 3})
    found = seen["methods"]["bm25"]["recall@1"]
    assert 0 <= found["lower"] < found["mean"] < found["upper"] <= 1
    assert seen["differences"] == {}


def test_a_tool_that_is_as_right_is_in_nobodys_way() -> None:
    def rank_of(beside: frozenset[str]) -> float:
        asked = [pair(0, "pear", "apple apple pear", beside=beside)]
        report = evaluate(asked, NAMES, methods_of(NAMES, {}), NAMES, against="bm25", seed=1)
        return float(report["seen"]["methods"]["bm25"][MRR]["mean"])

    assert (rank_of(frozenset()), rank_of(frozenset({"apple"}))) == (1 / 2, 1)


def report_of(encoder: float, others: dict[str, float], conversations: int = 60) -> dict[str, Any]:
    """That of an encoder, a base and BM25 that find the right tool in these shares of unseen cases."""
    pairs, vectors = [], {}
    for number in range(conversations):
        is_found = number < others["bm25"] * conversations
        pairs.append(pair(number, "apple", "apple" if is_found else "pear"))
    tools = np.eye(2, dtype=np.float32)
    for name, share in (("encoder", encoder), ("base", others["base"])):
        right = [number < share * conversations for number in range(conversations)]
        vectors[name] = Vectors(tools, np.array([[is_right, not is_right] for is_right in right], np.float32))
    return evaluate(pairs, NAMES[:2], methods_of(NAMES[:2], vectors), [], against="encoder", seed=1)


@pytest.mark.slow
def test_an_encoder_is_kept_only_if_it_is_better_than_all_three() -> None:
    better = report_of(0.9, {"base": 0.2, "bm25": 0.3})
    assert set(better["unseen"]["methods"]) == {"encoder", "encoder + bm25", *BASELINES}
    assert not_better(better) == ""
    found = better["unseen"]["differences"]["bm25"][MRR]
    assert 0 < found["lower"] < found["mean"] < found["upper"]
    for name in ("base", "bm25"):
        beaten = {"base": 0.2, "bm25": 0.3, name: 0.9}
        assert f"better than {name} (" in not_better(report_of(0.9, beaten))
    # A difference that may be chance is not enough.
    assert "not shown to be better than b" in not_better(report_of(0.35, {"base": 0.1, "bm25": 0.3}))
    better["unseen"]["differences"]["base + bm25"][MRR]["lower"] = -0.01
    assert "better than base + bm25 (reciprocal rank +" in not_better(better)


def test_without_an_unseen_tool_nothing_is_kept() -> None:
    vectors = Vectors(np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)[:1])
    methods = methods_of(NAMES, {"encoder": vectors, "base": vectors})
    report = evaluate([pair(0, "apple", "x")], NAMES, methods, NAMES, against="encoder", seed=1)
    assert report["unseen"]["methods"]["encoder"]["recall@1"] == {"mean": None, "lower": None, "upper": None}
    assert report["unseen"]["differences"]["base"][MRR] == {"mean": None, "lower": None, "upper": None}
    assert "no held-out conversation calls" in not_better(report)
