"""A trained encoder: made of calls, measured on those that are held out, and kept in a directory if it is better."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from flywheel import __version__
from flywheel.errors import ConfigError, TrainError
from flywheel.records.states import Split
from flywheel.retrieval import encoder
from flywheel.retrieval.encoder import EncoderOptions, architecture_of, train
from flywheel.retrieval.evaluation import BASE, METRICS, NEW, UNSEEN, Vectors, evaluate, methods_of, not_better
from flywheel.retrieval.pairs import Calls, trained_tools, training_rows
from flywheel.retrieval.texts import encoded_query
from flywheel.retrieval.tool_index import RECORD, Method, record_in
from flywheel.system.files import sync, write_atomic, write_json

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

VLLM_ARCHITECTURES: Final = frozenset({
    "BertModel", "Gemma2Model", "Gemma3TextModel", "GteModel", "GteNewModel", "LlamaModel", "MistralModel",
    "ModernBertModel", "NomicBertModel", "Qwen2Model", "RobertaModel", "XLMRobertaModel",
})  # fmt: skip
"""Those of embedding models of one vector per text in vLLM 0.32. MPNetModel is none of them."""

NO_CALLS: Final = "`flywheel tasks` lists the tasks; the results of their calls must be recorded."


def train_encoder(calls: Calls, base: str, out: Path, options: EncoderOptions, negatives: int) -> dict[str, Any]:
    """Train `base` on the training split of calls, measure it on the others, and write the directory `out`: with the
    encoder if it is better on unseen tools than the base, BM25 and their fusion, else without, so that BM25 answers.

    Returns what is written to `RECORD`. Raises ConfigError and TrainError.
    """
    attempted = f"train an encoder in {out}"
    encoder.require(attempted, *encoder.TRAINING)
    if out.exists():
        raise ConfigError(attempted, "it exists", "Name another directory with --out, or remove it.")
    trained = trained_tools(calls.tools, options.seed)
    rows = training_rows(calls, trained, negatives, options.seed)
    if not rows:
        why = "no accepted task of the training split calls a tool with success"
        raise TrainError(attempted, why, NO_CALLS)
    _require_held_out(calls)
    model = encoder.load_model(base)
    before = vectors_of(model, calls)
    train(model, rows, options)
    report = measured(calls, {NEW: vectors_of(model, calls), BASE: before}, trained, options.seed)
    reason = not_better(report)
    architecture = architecture_of(model)
    record = {
        "method": (Method.BM25 if reason else Method.ENCODER).value,
        "reason": reason,
        # Not the path: the directory may be published.
        "base": Path(base).name if Path(base).expanduser().is_dir() else base,
        "architecture": architecture,
        "is_served_by_vllm": architecture in VLLM_ARCHITECTURES,
        "options": asdict(options),
        "pairs": len(rows),
        "negatives": sum(name.startswith("negative") for name in rows[0]),
        "tools": len(calls.tools),
        "trained_tools": sorted(trained),
        "results": report,
        "version": __version__,
    }
    _write(out, None if reason else model, record, attempted)
    return record


def evaluate_encoder(calls: Calls, directory: Path | None, seed: int, base: str | None = None) -> dict[str, Any]:
    """The report on held-out calls: of BM25, and of the encoder in a directory and a `base`, alone and fused with it.
    If the encoder was trained here, unseen tools are those that its training did not see, else those that training
    would not.

    Raises ConfigError.
    """
    _require_held_out(calls)
    record = record_in(directory) if directory is not None else {}
    if record.get("method") == Method.BM25:
        raise ConfigError(
            f"evaluate the encoder in {directory}",
            f"BM25 stayed there: {record.get('reason')}",
            "Leave out --encoder, or name a directory with an encoder.",
        )
    trained = frozenset(record["trained_tools"]) if record else trained_tools(calls.tools, seed)
    named = {name: each for name, each in ((NEW, directory), (BASE, base)) if each is not None}
    vectors = {name: vectors_of(encoder.load_model(each), calls) for name, each in named.items()}
    return measured(calls, vectors, trained, seed)


def vectors_of(model: SentenceTransformer, calls: Calls) -> Vectors:
    queries = [encoded_query(pair.query) for pair in calls.pairs[Split.HELD_OUT]]
    return Vectors(encoder.tool_vectors(model, list(calls.tools.values())), encoder.query_vectors(model, queries))


def measured(calls: Calls, encoders: Mapping[str, Vectors], trained: frozenset[str], seed: int) -> dict[str, Any]:
    against = NEW if NEW in encoders else Method.BM25.value
    methods = methods_of(list(calls.tools.values()), encoders)
    return evaluate(calls.pairs[Split.HELD_OUT], list(calls.tools), methods, trained, against=against, seed=seed)


def _require_held_out(calls: Calls) -> None:
    if not calls.pairs[Split.HELD_OUT]:
        why = "no accepted task of the held-out split calls a tool with success"
        raise TrainError("measure retrieval", why, NO_CALLS)


def _write(out: Path, model: SentenceTransformer | None, record: Mapping[str, Any], attempted: str) -> None:
    """Write the directory beside its place, and move it there when it is whole."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            folder = Path(work) / "new"
            folder.mkdir()
            if model is not None:
                model.save(str(folder), create_model_card=False)
            write_atomic(folder / "README.md", card(out.name, record).encode())
            write_json(folder / RECORD, record)
            folder.rename(out)
            sync(out.parent)
    except OSError as error:
        hint = "Choose with --out a directory that may be written and has room."
        raise TrainError(attempted, error.strerror or str(error), hint) from error


def card(name: str, record: Mapping[str, Any]) -> str:
    """The model card: YAML for the Hub, then what is known in Markdown."""
    base, architecture, is_kept = record["base"], record["architecture"], record["method"] == Method.ENCODER
    front = {
        **({"base_model": base} if "/" in base else {}),  # The Hub takes its own names only.
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["tool-retrieval", "agentscope-flywheel"],
    }
    serving = (
        f"vLLM lists its architecture, {architecture}: `vllm serve {name} --runner pooling`."
        if record["is_served_by_vllm"]
        else f"vLLM does not list its architecture, {architecture or 'which is no transformer'}."
    )
    use = (
        f"An encoder of conversations and tools. `flywheel.ToolIndex({name!r}, tools)` and"
        f" `sentence_transformers.SentenceTransformer({name!r})` load it. {serving}"
        if is_kept
        else f"BM25 stays in use; no encoder was written here: {record['reason']}."
    )
    data = (
        f"It was trained on {record['pairs']:,} successful calls of accepted conversations with agents, each with"
        f" {record['negatives']} hard negatives, from the base `{base}`. Training saw"
        f" {len(record['trained_tools']):,} of {record['tools']:,} tools."
    )
    tables = "\n\n".join(
        f"{group} tools, {_counts(each)}:\n\n{_table(each)}" for group, each in record["results"].items()
    )
    limits = (
        f"It was measured on held-out conversations of the same agents. The reciprocal rank on {UNSEEN} tools decided"
        f" whether it is kept. It was trained on conversations of users: treat the weights as that data."
    )
    sections = {"Use": use, "Data": data, "Results": tables, "Limits": limits}
    text = "".join(f"\n## {title}\n\n{content}\n" for title, content in sections.items())
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {name}\n{text}"


def _counts(group: Mapping[str, Any]) -> str:
    return f"{group['pairs']:,} calls of {group['tools']:,} tools in {group['conversations']:,} conversations"


def _table(group: Mapping[str, Any]) -> str:
    lines = [f"| method | {' | '.join(METRICS)} |", f"|---|{'---:|' * len(METRICS)}"]
    for method, found in group["methods"].items():
        means = (found[metric]["mean"] for metric in METRICS)
        lines.append(f"| {method} | {' | '.join('' if mean is None else f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)
