"""What `flywheel evaluate` measures: models by their names, and when an evaluation is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel.config.file import Config
from flywheel.daemon.evaluation import (
    Benchmark,
    EvaluatedModel,
    Evaluation,
    evaluation_settings,
    is_evaluation,
    model_named,
)
from flywheel.daemon.evaluation_answers import Answer
from flywheel.errors import ConfigError
from flywheel.judge.agent_metrics import SCORE
from flywheel.judge.rubric.file import load_rubric
from flywheel.store.kernel.database import Store
from tests.factories.config import BOXED_RUBRIC, make_config
from tests.factories.round import put_deployed
from tests.factories.task import round_task


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return evaluation_settings(make_config(tmp_path, model={"base": "org/base", "alias": "agent"}), 2)


def folder(path: Path, **files: object) -> Path:
    path.mkdir()
    for name, content in files.items():
        file = path / name.replace("__", ".")
        file.write_bytes(b"") if content is None else file.write_text(json.dumps(content))
    return path


def test_models_are_named_as_people_name_them(config: Config, tmp_path: Path) -> None:
    assert model_named("base", config, None) == EvaluatedModel("base", "org/base")
    # Nothing is deployed: the alias is the base model.
    assert model_named("agent", config, None) == EvaluatedModel("agent", "org/base")
    model = folder(tmp_path / "whole", config__json={})
    assert model_named(str(model), config, None) == EvaluatedModel("whole", str(model))
    about = {"base_model_name_or_path": str(model)}
    adapter = folder(tmp_path / "ours", adapter_config__json=about, adapter_model__safetensors=None)
    found = model_named(str(adapter), config, None)
    assert (found.base_model, found.adapter and found.adapter.path) == (str(model), str(adapter))
    for wrong in ("r0007", str(folder(tmp_path / "empty"))):
        with pytest.raises(ConfigError):
            model_named(wrong, config, None)
    with pytest.raises(ConfigError, match="no HTTP URL"):
        model_named("m", config, None, "localhost:8000")


async def test_adapters_of_rounds_are_those_of_the_state(
    config: Config, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = folder(tmp_path / "base", config__json={})
    await store.write(put_deployed, str(base))
    deployed = await store.read(lambda conn: model_named("agent", config, conn))
    named = await store.read(lambda conn: model_named("r0001", config, conn))
    assert (deployed.name, named.name) == ("agent (r0001)", "r0001")
    assert deployed.adapter == named.adapter
    assert deployed.adapter is not None and deployed.base_model == str(base)
    # Its files are not there, as after retention.
    monkeypatch.setattr("flywheel.daemon.evaluation.require_packages", lambda _: None)
    measured = Evaluation(named, Benchmark("b", (round_task("a"),)), load_rubric(BOXED_RUBRIC), config)
    with pytest.raises(ConfigError, match=r"evaluate r0001: its directory .* is not there.*retention\.keep_days"):
        measured.check()


def test_only_what_cannot_come_out_otherwise_is_known(config: Config) -> None:
    benchmark, rubric = Benchmark("b.jsonl", (round_task("a"), round_task("b"))), load_rubric(BOXED_RUBRIC)
    here = Evaluation(EvaluatedModel("base", "org/base"), benchmark, rubric, config)
    there = Evaluation(model_named("m", config, None, "http://h/v1", "secret"), benchmark, rubric, config)
    for each in (here, there):
        each.directory.mkdir(parents=True)
        for name in ("spec.json", "result.json", "answers.jsonl"):
            (each.directory / name).touch()
        assert is_evaluation(each.directory)
    assert here.is_known
    assert not there.is_known
    # The key is in no file, and not in the name of the directory.
    again = Evaluation(model_named("m", config, None, "http://h/v1", "other"), benchmark, rubric, config)
    assert again.directory == there.directory
    others = (
        Evaluation(EvaluatedModel("base", "org/other"), benchmark, rubric, config),
        Evaluation(here.model, Benchmark("b.jsonl", (round_task("a"),)), rubric, config),
        Evaluation(here.model, benchmark, rubric.model_copy(update={"threshold": 0.9}), config),
        Evaluation(here.model, benchmark, rubric, evaluation_settings(config, 3)),
    )
    assert len({here.directory, there.directory, *(each.directory for each in others)}) == 6


@pytest.mark.parametrize(
    ("cause", "accepted", "score"),
    [
        ("engine_error", None, None),
        ("broken_stream", None, None),
        ("abandoned_call", False, 0.0),
        ("raised", False, 0.0),
    ],
)
def test_only_what_the_engine_failed_is_undecided(cause: str, accepted: bool | None, score: float | None) -> None:
    line = {
        "verdict": None, "error": "it failed", "program": {"failure": cause}, "steps": [], "answer": "7",
        "reward": None, "criteria": [], "turns": 1,
    }  # fmt: skip
    line["truncated"] = False
    answer = Answer.of(round_task(), line, load_rubric(BOXED_RUBRIC))
    assert (answer.accepted, answer.case.values[SCORE]) == (accepted, score)
