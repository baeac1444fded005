"""A round of SFT on replies that its worker chooses by their loss, with real Ray, vLLM and TRL."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from flywheel.cli.demo import judge
from flywheel.config import Config
from flywheel.records.round import SamplePool
from flywheel.records.selection import Candidate, SelectionRules
from flywheel.training.data.loss_selection import read_selection
from tests.factories.worker import run, spec, with_reply

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def test_the_worker_trains_on_what_it_chooses_and_says_what_became_of_the_others(tmp_path: Path) -> None:
    with judge.running() as url:
        made = spec(url)
        settings = json.loads(json.dumps(made.settings))
        settings["training"] |= {"stages": ["sft"], "coreset": {"size": 8, "strategy": "hybrid"}}
        settings["training"]["sft"] |= {"epochs": 1, "batch_size": 4}
        train = [with_reply(task) for task in made.train if task.exchange.reference][:24]
        candidates = {task.task_id: Candidate(number) for number, task in enumerate(train)}
        pool = SamplePool(size=8, strategy="hybrid", candidates=candidates, rules=SelectionRules(32, 1))
        about = {"train": train, "pool": pool, "settings": Config.model_validate(settings).model_dump(mode="json")}
        done = run(tmp_path / "r0001", made.model_copy(update=about))
    assert done.code == 0, (done.directory / "worker.log").read_text()[-3000:]
    lines = read_selection(done.directory)
    outcomes = Counter(line["outcome"] for line in lines)
    assert (outcomes["set aside"], outcomes["chosen by loss"], outcomes["chosen by diversity"]) == (1, 5, 3)
    assert [line["loss"] for line in lines] == sorted((line["loss"] for line in lines), reverse=True)
    result, [aside] = done.result, [line["task_id"] for line in lines if line["outcome"] == "set aside"]
    assert result.released == [line["task_id"] for line in lines if line["outcome"] == "released"]
    assert result.left_out[aside].startswith("set aside: its loss of")
    assert not set(result.released) & set(result.without_gradient)
    assert result.stages[0].steps == 2, "8 replies in batches of 4"
