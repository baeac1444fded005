"""Encoders that are genuinely trained: what is kept, what answers, and what the directory holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import flywheel
from benchmarks import tiny_encoder
from benchmarks.tool_calls import DataSet, replies, tools, words
from flywheel.errors import ConfigError, TrainError
from flywheel.records.states import Split
from flywheel.records.task import split_of, task_line
from flywheel.retrieval.encoder import EncoderOptions
from flywheel.retrieval.evaluation import BASELINES, MRR, NEW
from flywheel.retrieval.pairs import Calls
from flywheel.retrieval.tool_index import RECORD, Method
from flywheel.retrieval.trained_encoder import VLLM_ARCHITECTURES, card, evaluate_encoder, train_encoder

pytestmark = [pytest.mark.slow, pytest.mark.training]

OPTIONS = EncoderOptions(epochs=8, batch_size=32, learning_rate=2e-3, seed=42)
SHORT = EncoderOptions(epochs=1, batch_size=8, learning_rate=1e-3, seed=42)


def calls_of(data_set: DataSet, conversations: int) -> Calls:
    calls = Calls()
    for told in replies(data_set, conversations, 1):
        split = split_of(told.conversation_id, told.trace_id, train_ratio=0.7, seed=42)
        calls.add(task_line(told, "/made"), split)
    return calls


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder.make(tmp_path_factory.mktemp("base") / "tiny", words(), seed=1)


@pytest.fixture(scope="module")
def kept(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("kept") / "tool-encoder"
    return out, train_encoder(calls_of("disjoint", 700), str(base), out, OPTIONS, 4)


def test_an_encoder_that_is_better_on_unseen_tools_is_kept(kept: tuple[Path, dict[str, Any]]) -> None:
    out, record = kept
    assert (record["method"], record["reason"]) == (Method.ENCODER, "")
    unseen = record["results"]["unseen"]
    assert unseen["pairs"] > 30 and unseen["methods"][NEW]["recall@10"]["mean"] > 0.8
    for method in BASELINES:
        assert unseen["differences"][method][MRR]["lower"] > 0
    assert json.loads((out / RECORD).read_text()) == record
    called = {pair.tool for pair in calls_of("disjoint", 700).pairs[Split.HELD_OUT]}
    assert len(called - set(record["trained_tools"])) == unseen["tools"]


def test_an_agent_finds_an_unseen_tool_by_other_words(kept: tuple[Path, dict[str, Any]]) -> None:
    out, record = kept
    every = tools("disjoint")
    index = flywheel.ToolIndex(out, every.values())
    assert index.method is Method.ENCODER
    told = replies("disjoint", 700, 1)
    names = ((each.trajectory[0]["tool_calls"][0]["function"]["name"], each.query) for each in told)
    name, query = next((name, query) for name, query in names if name not in record["trained_tools"])
    asked = [{"role": "user", "content": query}]
    assert every[name] in index.search(asked, 10)
    assert flywheel.ToolIndex(None, every.values()).search(asked, 10) == []
    assert flywheel.ToolIndex(out, []).search(asked) == []


@pytest.mark.extended
def test_sentence_transformers_loads_it_and_the_card_says_what_it_is(kept: tuple[Path, dict[str, Any]]) -> None:
    from sentence_transformers import SentenceTransformer

    out, record = kept
    model = SentenceTransformer(str(out))
    assert model.encode(["set up a bill"]).shape == (1, 64)
    text = (out / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: sentence-transformers\n")
    for part in (f"{record['pairs']} successful calls", "BertModel: `vllm serve", "| encoder | ", "unseen tools, "):
        assert part in text
    assert str(out) not in text


@pytest.mark.extended
def test_evaluating_it_again_gives_the_same_figures(kept: tuple[Path, dict[str, Any]], base: Path) -> None:
    out, record = kept
    calls = calls_of("disjoint", 700)
    # Unseen are the tools that its training did not see, whatever the seed is now.
    again = evaluate_encoder(calls, out, 43)
    for group in ("seen", "unseen"):
        assert again[group]["pairs"] == record["results"][group]["pairs"]
        found, before = (each[group]["methods"] for each in (again, record["results"]))
        assert found.keys() == {"encoder", "encoder + bm25", "bm25"}
        assert {name: found[name][MRR]["mean"] for name in found} == pytest.approx(
            {name: before[name][MRR]["mean"] for name in found}
        )
    assert evaluate_encoder(calls, base, 42)["unseen"]["methods"]["encoder"][MRR]["mean"] == pytest.approx(
        record["results"]["unseen"]["methods"]["base"][MRR]["mean"]
    )


def test_where_words_overlap_bm25_stays_and_says_so(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "tool-encoder"
    calls = calls_of("overlap", 150)
    record = train_encoder(calls, str(base), out, EncoderOptions(2, 32, 2e-3, 42), 4)
    assert record["method"] == Method.BM25
    assert "not shown to be better than b" in record["reason"]
    assert sorted(path.name for path in out.iterdir()) == ["README.md", RECORD]
    assert f"BM25 stays in use; no encoder was written here: {record['reason']}." in (out / "README.md").read_text()
    every = tools("overlap")
    index = flywheel.ToolIndex(out, every.values())
    assert index.method is Method.BM25
    name = next(iter(every))
    assert index.search([{"role": "user", "content": f"Please {name.replace('_', ' the ')}"}], 1) == [every[name]]
    with pytest.raises(ConfigError, match="BM25 stayed there"):
        evaluate_encoder(calls, out, 42)


@pytest.mark.extended
def test_the_same_seed_gives_the_same_weights(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    monkeypatch.setattr("flywheel.retrieval.trained_encoder.not_better", lambda report: "")
    calls = calls_of("disjoint", 40)

    def weights(name: str, seed: int) -> dict[str, Any]:
        torch.manual_seed(hash(name) % 1000)
        train_encoder(calls, str(base), tmp_path / name, EncoderOptions(1, 8, 1e-3, seed), 2)
        return SentenceTransformer(str(tmp_path / name)).state_dict()

    first, again, other = weights("a", 7), weights("b", 7), weights("c", 8)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.extended
def test_a_batch_has_no_text_twice(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two rows of one tool in a batch would teach that it is wrong for both."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    batches: list[int] = []
    forward = MultipleNegativesRankingLoss.forward

    def watched(self: Any, sentence_features: Any, *rest: Any, **more: Any) -> Any:
        features = list(sentence_features)
        texts = [tuple(row[row != 0].tolist()) for column in features for row in column["input_ids"]]
        assert len(texts) == len(set(texts))
        batches.append(len(features[0]["input_ids"]))
        return forward(self, features, *rest, **more)

    monkeypatch.setattr(MultipleNegativesRankingLoss, "forward", watched)
    calls = calls_of("disjoint", 40)
    doubled = calls.pairs[Split.TRAIN] * 2
    calls.pairs[Split.TRAIN] = doubled
    record = train_encoder(calls, str(base), tmp_path / "out", SHORT, 2)
    assert max(batches) > 1 and sum(batches) <= record["pairs"]


def test_an_encoder_of_someone_else_is_fused_with_bm25(base: Path) -> None:
    every = tools("overlap")
    index = flywheel.ToolIndex(str(base), every.values())
    assert index.method is Method.FUSION
    name = next(iter(every))
    assert every[name] in index.search([{"role": "user", "content": f"Please {name.replace('_', ' the ')}"}], 5)
    # Where no word is known, the encoder alone answers.
    assert len(index.search([{"role": "user", "content": "zebra"}], 5)) == 5


def test_what_cannot_be_trained_or_loaded_is_refused_first(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match="no accepted task of the training split calls a tool"):
        train_encoder(Calls(), str(base), tmp_path / "out", SHORT, 2)
    calls = calls_of("disjoint", 5)
    calls.pairs[Split.HELD_OUT] = []
    with pytest.raises(TrainError, match="no accepted task of the held-out split calls a tool"):
        evaluate_encoder(calls, None, 42)
    monkeypatch.setattr("flywheel.retrieval.trained_encoder.train", pytest.fail)
    with pytest.raises(TrainError, match="no accepted task of the held-out split calls a tool"):
        train_encoder(calls, str(base), tmp_path / "out", SHORT, 2)
    with pytest.raises(ConfigError, match="it exists"):
        train_encoder(calls, str(base), tmp_path, SHORT, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot load the encoder"):
        flywheel.ToolIndex(tmp_path / "empty", tools("overlap").values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_a_file_system_error_leaves_nothing_behind(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flywheel.retrieval.trained_encoder.write_json", full)
    with pytest.raises(TrainError, match="No space left on device"):
        train_encoder(calls_of("disjoint", 20), str(base), tmp_path / "out", SHORT, 2)
    assert list(tmp_path.iterdir()) == []


def test_vllm_lists_the_architectures_that_the_card_names(kept: tuple[Path, dict[str, Any]]) -> None:
    from vllm.model_executor.models.registry import _EMBEDDING_MODELS

    assert _EMBEDDING_MODELS.keys() >= VLLM_ARCHITECTURES
    assert "MPNetModel" not in _EMBEDDING_MODELS
    other = {**kept[1], "architecture": "MPNetModel", "is_served_by_vllm": "MPNetModel" in VLLM_ARCHITECTURES}
    assert "vLLM does not list its architecture, MPNetModel." in card("x", other)


@pytest.mark.extended
def test_a_model_without_pooling_gets_one(base: Path, tmp_path: Path) -> None:
    """Here the mean of its tokens, which the base has, too."""
    plain = tmp_path / "plain"
    shutil.copytree(base, plain, ignore=shutil.ignore_patterns("modules.json", "*sentence*", "1_Pooling"))
    asked = [{"role": "user", "content": "which invoice"}]
    every = tools("disjoint").values()
    assert flywheel.ToolIndex(plain, every).search(asked) == flywheel.ToolIndex(base, every).search(asked)
