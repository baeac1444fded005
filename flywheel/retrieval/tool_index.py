"""The index that an agent searches: BM25, an encoder, or both by rank fusion."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from flywheel.errors import ConfigError
from flywheel.records.tool_calls import functions_by_name
from flywheel.records.trace import ChatMessage, ToolDefinition
from flywheel.retrieval import encoder
from flywheel.retrieval.texts import encoded_query, query_texts, tool_text, tools_by_name, words_of

RECORD: Final = "retrieval.json"
"""Beside a trained encoder: how it was trained and measured, and the method that answers."""
DEPTH: Final = 100
"""How many tools of each ranking are fused."""
FUSED_RANK: Final = 60
"""The constant of reciprocal rank fusion (Cormack, Clarke and Büttcher 2009)."""

OLDER: Final = 0.25
"""What a word of a message counts for BM25 beside one of the next newer message."""


class Method(StrEnum):
    BM25 = "bm25"
    ENCODER = "encoder"
    FUSION = "fusion"


class Ranking:
    """Texts of tools, in the order of their relevance to a query.

    `vectors` are those of the texts, of length 1 and shape (texts, dimensions); BM25 needs none.
    """

    def __init__(self, texts: Sequence[str], method: Method, vectors: np.ndarray | None = None) -> None:
        self.method = method
        self._size = len(texts)
        self._bm25 = None
        self._vectors = np.empty((0, 0), np.float32) if vectors is None else vectors
        if method is not Method.ENCODER:
            encoder.require("index tools", "bm25s")
            import bm25s

            words = [words_of(text) for text in texts]
            if any(words):
                self._bm25 = bm25s.BM25()
                self._bm25.index(words, show_progress=False)

    def best(self, query: Sequence[str], vector: np.ndarray | None, k: int) -> list[int]:
        """The positions of at most `k` texts, the best first. `query` are the texts of a conversation, the newest
        first, and `vector` is theirs, of shape (dimensions,).

        BM25 finds only texts that have a word in common with the query, and equal ones in their order. A word
        counts once, in the newest message that has it, and less in an older one: earlier requests are mostly done.
        """
        depth = max(k, DEPTH)
        rankings = []
        if self._bm25 is not None:
            scores = np.zeros(self._size, np.float32)
            said: set[str] = set()
            for age, text in enumerate(query):
                if new := list(dict.fromkeys(word for word in words_of(text) if word not in said)):
                    scores += self._bm25.get_scores(new) * OLDER**age
                    said.update(new)
            rankings.append(_top(scores, depth, above=0.0))
        if self.method is not Method.BM25:
            assert vector is not None
            rankings.append(_top(self._vectors @ vector, depth))
        if len(rankings) == 1:
            return list(map(int, rankings[0][:k]))
        fused: dict[int, float] = {}
        for ranking in rankings:
            for rank, position in enumerate(ranking.tolist(), 1):
                fused[position] = fused.get(position, 0.0) + 1 / (FUSED_RANK + rank)
        return sorted(fused, key=lambda position: (-fused[position], position))[:k]


def _top(scores: np.ndarray, k: int, above: float = -np.inf) -> np.ndarray:
    """The positions of the `k` highest scores above a limit, in order; equal scores by position."""
    if k < len(scores):
        above = max(above, np.nextafter(np.partition(scores, -k)[-k], -np.inf, dtype=scores.dtype))
    found = np.flatnonzero(scores > above)
    return found[np.argsort(-scores[found], kind="stable")][:k]


class ToolIndex:
    """An index over the tools of an agent.

    Search needs at most a few milliseconds among 10,000 tools, and with an encoder the time to encode the query.

    Args:
        directory: What `flywheel retrieval train` wrote: its trained encoder answers, or BM25 where that stayed. An
            encoder that it did not write (any directory that sentence-transformers loads) is fused with BM25. None:
            BM25 alone.
        tools: Their definitions in the OpenAI chat form. Of two with the same name, the last counts.

    Raises ConfigError for a directory that holds no encoder, a tool without a name, and a missing package.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, tools: Iterable[ToolDefinition]) -> None:
        by_name = tools_by_name(tools)
        self._tools = list(by_name.values())
        texts = [tool_text(function) for function in functions_by_name(self._tools).values()]
        self.method = Method.BM25 if directory is None else method_of(Path(directory).expanduser())
        self._model = None
        vectors = None
        if directory is not None and self.method is not Method.BM25:
            self._model = encoder.load_model(Path(directory).expanduser())
            vectors = encoder.tool_vectors(self._model, texts)
        self._ranking = Ranking(texts, self.method, vectors)

    def search(self, messages: Sequence[ChatMessage], k: int = 10) -> list[ToolDefinition]:
        """The definitions of at most `k` tools for the next call of a conversation, the best first.

        `messages` have the OpenAI chat form. BM25 finds no tool without a word of the conversation, so it can find
        fewer than `k`.
        """
        query = query_texts(messages)
        if k < 1 or not self._tools or not query:
            return []
        vector = None if self._model is None else encoder.query_vectors(self._model, [encoded_query(query)])[0]
        return [self._tools[position] for position in self._ranking.best(query, vector, k)]


def method_of(directory: Path) -> Method:
    """The method that answers with what is in a directory. Raises ConfigError."""
    return Method(record_in(directory).get("method", Method.FUSION))


def record_in(directory: Path) -> dict[str, Any]:
    """The record of a directory that `flywheel retrieval train` wrote; empty for another. Raises ConfigError."""
    if not directory.is_dir():
        hint = "Name the directory that `flywheel retrieval train --out` wrote, or leave it out for BM25."
        raise ConfigError(f"use the encoder in {directory}", "there is no such directory", hint)
    try:
        record: dict[str, Any] = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        Method(record["method"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Train again with `flywheel retrieval train`."
        raise ConfigError(f"read {directory / RECORD}", f"it is damaged ({error})", hint) from error
    return record
