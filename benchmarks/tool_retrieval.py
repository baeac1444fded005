"""How well an encoder that is trained on tool calls finds tools, and how long a search takes:
`python -m benchmarks.tool_retrieval`, about two minutes on two cores.

Two data sets of `benchmarks.tool_calls`, which are made by that script: in `disjoint` users say none of the words of
the tool, in `overlap` they say its words, and BM25 is expected to win. The base is a tiny BERT of random weights with
a vocabulary of the data's words, since no encoder can be downloaded here.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import measurement, tiny_encoder
from benchmarks.tool_calls import DATA_SETS, DataSet, replies, words
from flywheel.records.task import split_of, task_line
from flywheel.retrieval.encoder import EncoderOptions
from flywheel.retrieval.evaluation import BASE, MRR
from flywheel.retrieval.pairs import Calls
from flywheel.retrieval.texts import MOST_CHARACTERS, MOST_MESSAGES
from flywheel.retrieval.tool_index import Method, Ranking
from flywheel.retrieval.trained_encoder import train_encoder
from flywheel.system.files import write_atomic

RESULTS: Final = Path(__file__).parent / "results" / "tool-retrieval.json"
SHOWN: Final = ("recall@1", "recall@10", MRR)
CONVERSATIONS: Final = 1_000
OPTIONS: Final = EncoderOptions(epochs=8, batch_size=32, learning_rate=2e-3, seed=42)
NEGATIVES: Final = 4
TOOLS: Final = 10_000
DIMENSIONS: Final = 384
"""Of the vectors whose search is timed: those of small encoders, such as MiniLM and BGE-small."""


def trained(data_set: DataSet, folder: Path, conversations: int) -> dict[str, Any]:
    """The record of an encoder that is trained on a data set, without the names of its tools."""
    calls = Calls()
    for told in replies(data_set, conversations, 1):
        split = split_of(told.conversation_id, told.trace_id, train_ratio=0.7, seed=OPTIONS.seed)
        calls.add(task_line(told, "/made"), split)
    base = tiny_encoder.make(folder / "base", words(), seed=1)
    start = time.perf_counter()
    record = train_encoder(calls, str(base), folder / data_set, OPTIONS, NEGATIVES)
    return {
        **record,
        "base": "a tiny BERT of random weights",
        "trained_tools": len(record["trained_tools"]),
        "seconds": time.perf_counter() - start,
    }


def searched(count: int, queries: int) -> dict[str, Any]:
    """Milliseconds of a core that searches among `count` tools need, by method, without the encoding of queries:
    processor time of one thread, which other programs on the machine do not lengthen.

    `request` is one sentence of 14 words; `full` is the longest conversation that the index reads.
    """
    import threadpoolctl

    drawn = random.Random(1)
    # As in a language (Zipf): the most frequent words are in most texts, and cost the most.
    vocabulary = [f"w{number:05}" for number in range(20_000)]
    shares = list(itertools.accumulate(1 / rank for rank in range(1, len(vocabulary) + 1)))
    vectors = np.random.default_rng(1).normal(size=(count, DIMENSIONS)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def said(characters: int) -> str:
        return " ".join(drawn.choices(vocabulary, cum_weights=shares, k=characters // 7))

    texts = [said(300) for _ in range(count)]
    asked: dict[str, list[Sequence[str]]] = {
        "request": [(said(100),) for _ in range(queries)],
        "full": [tuple(said(MOST_CHARACTERS // MOST_MESSAGES) for _ in range(MOST_MESSAGES)) for _ in range(queries)],
    }
    found: dict[str, Any] = {"tools": count, "dimensions": DIMENSIONS}
    with threadpoolctl.threadpool_limits(1):
        for method in (Method.BM25, Method.FUSION):
            ranking = Ranking(texts, method, vectors)
            for kind, some in asked.items():
                taken = []
                for place, query in enumerate(some):
                    start = time.thread_time()
                    ranking.best(query, vectors[place], 10)
                    taken.append(1000 * (time.thread_time() - start))
                found[f"{method}_{kind}_ms"] = {
                    "median": measurement.percentile(taken, 0.5),
                    "p99": measurement.percentile(taken, 0.99),
                }
    return found


def tables(results: dict[str, Any]) -> str:
    """The tables of the page, as Markdown."""
    found = []
    for data_set in DATA_SETS:
        for group, figures in results[data_set]["results"].items():
            heads = ["method", *SHOWN, "encoder − method, mrr (95 %)"]
            rows = []
            for method, own in figures["methods"].items():
                if method.startswith(BASE):
                    continue  # nothing was trained: a weak base, which says little
                less = figures["differences"].get(method, {}).get(MRR)
                reach = f"{less['mean']:+.3f} ({less['lower']:+.3f} to {less['upper']:+.3f})" if less else ""
                rows.append([method, *(f"{own[metric]['mean']:.3f}" for metric in SHOWN), reach])
            title = f"`{data_set}`, {group} tools: {figures['pairs']} calls of {figures['tools']} tools"
            found.append(f"{title}, {figures['conversations']} conversations\n\n{measurement.markdown(heads, rows)}")
    search, rows = results["search"], []
    for method in (Method.BM25, Method.FUSION):
        taken = [search[f"{method}_{kind}_ms"][key] for kind in ("request", "full") for key in ("median", "p99")]
        rows.append([method.value, *(f"{each:.2f}" for each in taken)])
    heads = ["ms", "request, median", "request, p99", "full, median", "full, p99"]
    return "\n\n".join([*found, measurement.markdown(heads, rows)])


def main() -> None:
    parser = measurement.parser("tool_retrieval", __doc__)
    parser.add_argument("--table", action="store_true", help="print the tables from the file of figures, and end")
    options = parser.parse_args()
    if options.table:
        print(tables(json.loads(RESULTS.read_text())))
        return
    before = measurement.machine()
    with tempfile.TemporaryDirectory(prefix="flywheel-tools-") as folder:
        conversations = 60 if options.quick else CONVERSATIONS
        results: dict[str, Any] = {one: trained(one, Path(folder), conversations) for one in DATA_SETS}
    results["search"] = searched(TOOLS // 10 if options.quick else TOOLS, 20 if options.quick else 500)
    results["machine"] = before
    if not options.quick:
        write_atomic(RESULTS, (json.dumps(results, indent=1) + "\n").encode())
    print(json.dumps(results) if options.json else tables(results))


if __name__ == "__main__":
    main()
