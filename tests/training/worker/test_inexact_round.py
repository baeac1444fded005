"""A round whose prompts turn out not to be what the model was sent ends with a result, so that they are marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.records.round import GateTest
from flywheel.training.data.prompts import Asked
from flywheel.training.worker import round_prompts
from flywheel.training.worker.round import Round
from tests.factories.round import round_spec
from tests.factories.task import round_task
from tests.training.data.rollouts import prompt

OTHER = "its prompt has 28 tokens, and the model was sent 256"


def made(directory: Path, monkeypatch: pytest.MonkeyPatch, train: Asked, gate: Asked) -> Round:
    settings = Config.model_validate({"gate": {"min_tasks": 2}})
    test = GateTest(epoch=1, number=1, alpha=0.004)
    spec = round_spec(held_out=[round_task()], rubric={}, settings=settings.model_dump(mode="json"), test=test)
    whole = Round(spec, directory, settings, lambda *_: Any)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(whole, "start", lambda: None)
    monkeypatch.setattr(whole.prompts, "to_train", lambda _: train)
    monkeypatch.setattr(whole.prompts, "_encoded", lambda _: ([], {}))
    monkeypatch.setattr(round_prompts, "asked_as_served", lambda *_, **__: gate)
    return whole


SOME = [prompt("t-1", (1,)), prompt("t-2", (2,))]
NONE = Asked([], {"t-3": OTHER}, {"t-3": OTHER})


@pytest.mark.parametrize(
    ("train", "gate", "left"),
    [
        (NONE, Asked(SOME, {}), "0 for training and 2 for the gate"),
        (Asked(SOME, {}), NONE, "2 for training and 0 for"),
    ],
)
def test_too_few_exact_prompts_refuse_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Asked, gate: Asked, left: str
) -> None:
    result = made(tmp_path, monkeypatch, train, gate).run()
    assert (result.outcome, result.inexact, result.adapter) == ("refused", {"t-3": OTHER}, None)
    assert left in result.reason
    assert OTHER in result.reason


def test_too_few_prompts_for_other_reasons_still_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainError, match="none of its 1 tasks"):
        made(tmp_path, monkeypatch, Asked([], {"t-3": "too long"}), Asked(SOME, {})).run()
    with pytest.raises(
        TrainError, match=r"of its 1 held-out tasks 0 can be asked, and gate\.min_tasks is 2"
    ) as caught:
        made(tmp_path, monkeypatch, Asked(SOME, {}), Asked([], {"t-3": "too long"})).run()
    assert not caught.value.retryable
    assert not (tmp_path / "metrics.jsonl").exists(), "it fails before it trains"
