"""`flywheel retrieval` as a person runs it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tool_calls import DataSet, replies, words
from flywheel.records.states import Split, TaskState
from flywheel.records.task import split_of
from tests.cli.conftest import Run
from tests.factories.documented_json import compare, documented
from tests.training.data.formats.filling import Judged, fill


def filled(folder: Path, data_set: DataSet, conversations: int) -> None:
    """A state of judged replies; every tenth was rejected."""
    judged = []
    for number, told in enumerate(replies(data_set, conversations, 1)):
        split = split_of(told.conversation_id, told.trace_id, train_ratio=0.7, seed=42)
        state = TaskState.REJECTED if number % 10 == 0 else TaskState.ACCEPTED
        judged.append(Judged(told, state, float(state is TaskState.ACCEPTED), split))
    asyncio.run(fill(folder, judged))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    filled(tmp_path / "home", "overlap", 60)
    return tmp_path / "home"


def expected_pairs(split: Split) -> int:
    found = 0
    for number, told in enumerate(replies("overlap", 60, 1)):
        own = split_of(told.conversation_id, told.trace_id, train_ratio=0.7, seed=42)
        found += own is split and number % 10 > 0 and told.trajectory[1]["content"].startswith("ok")
    return found


def configured(tmp_path: Path) -> Path:
    path = tmp_path / "flywheel.yaml"
    path.write_text(json.dumps({"state": {"dir": str(tmp_path / "home")}}))
    return path


@pytest.mark.slow
def test_bm25_is_measured_without_an_encoder(flywheel: Run, home: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    ran = flywheel("retrieval", "evaluate", "-c", configured(tmp_path), "--json")
    assert ran.code == 0, ran.err
    results = ran.json["results"]
    compare(ran.json, documented("retrieval evaluate"), "retrieval evaluate")
    assert ran.json["encoder"] is None
    assert sum(group["pairs"] for group in results.values()) == expected_pairs(Split.HELD_OUT)
    assert results["seen"]["methods"]["bm25"]["recall@10"]["mean"] == 1
    ran = flywheel("retrieval", "evaluate", "-c", configured(tmp_path))
    assert f"seen tools: {results['seen']['pairs']} calls of" in ran.out
    assert "recall@1   recall@5  recall@10" in ran.out
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--target", "support"), "there is no target support"),
        (("--encoder", "missing"), "there is no such directory"),
    ],
)
def test_what_is_wrong_is_named(
    flywheel: Run, home: Path, tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    flywheel("retrieval", "evaluate", "-c", configured(tmp_path), *arguments).fails(78, why)


def test_a_state_without_calls_and_no_state_are_named(flywheel: Run, tmp_path: Path) -> None:
    flywheel("retrieval", "evaluate", "-c", configured(tmp_path)).fails(1, "no state at")
    assert not (tmp_path / "home").exists()
    asyncio.run(fill(tmp_path / "home", []))
    flywheel("retrieval", "evaluate", "-c", configured(tmp_path)).fails(
        1, "no accepted task of the held-out split calls a tool with success"
    )


@pytest.mark.training
@pytest.mark.slow
def test_training_says_what_stays(flywheel: Run, home: Path, tmp_path: Path) -> None:
    from benchmarks import tiny_encoder

    base = tiny_encoder.make(tmp_path / "base", words(), seed=1)
    asked = ["retrieval", "train", "-c", configured(tmp_path), "--base", base, "--epochs", 1, "--negatives", 2]
    asked += ["--set", "training.seed=3"]
    ran = flywheel(*map(str, asked), "--out", tmp_path / "made", "--json")
    assert ran.code == 0, ran.err
    made: dict[str, Any] = ran.json
    compare(made, documented("retrieval train"), "retrieval train")
    assert made["method"] == "bm25" and made["out"] == str(tmp_path / "made")
    assert made["options"] == {"epochs": 1, "batch_size": 32, "learning_rate": 2e-5, "seed": 3}
    trained = json.loads((tmp_path / "made" / "retrieval.json").read_text())["trained_tools"]
    assert made["trained_tools"] == len(trained) < made["tools"]
    assert 0 < made["pairs"] < expected_pairs(Split.TRAIN)
    ran = flywheel(*map(str, asked), "--out", tmp_path / "again")
    assert f"\nBM25 stays: {made['reason']}." in ran.out
    assert "mrr   encoder - method, mrr (95 %)\n" in ran.out
    flywheel(*map(str, asked), "--out", tmp_path / "made").fails(78, "it exists")
    ran = flywheel("retrieval", "evaluate", "-c", configured(tmp_path), "--encoder", base, "--json")
    assert set(ran.json["results"]["seen"]["methods"]) == {"encoder", "encoder + bm25", "bm25"}
    ran = flywheel("retrieval", "evaluate", "-c", configured(tmp_path), "--encoder", base, "--base", base, "--json")
    differences = ran.json["results"]["seen"]["differences"]
    assert set(differences) == {"encoder + bm25", "base", "base + bm25", "bm25"}
    assert differences["base"]["mrr"]["mean"] == 0 < differences["base"]["mrr"]["upper"]
