"""Translations of other programs' files: which are accepted, what their rows show, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.config.file import load
from flywheel.config.translation import translate
from flywheel.config.trinity import TASKSET
from flywheel.errors import ConfigError
from tests.factories.foreign_files import foreign_files

FILES = dict(foreign_files())


def test_most_files_are_accepted() -> None:
    refused = [name for name, raw in FILES.items() if translate(raw, None).refused]
    assert (len(FILES) > 150, len(refused) < 10) == (True, True), refused


KEY = "sk-of-nobody-at-all-012345"


@pytest.mark.parametrize("is_variable", [True, False])
def test_no_row_has_a_key_and_one_from_the_environment_is_its_variable(
    is_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_USER", KEY if is_variable else "")
    filters = [{"type": "deduplication", "params": {"model": "e", "api_key": KEY}}]
    below = {"feedback_tracing": {"filters": filters}, "model": {"path": "m"}, "board": {"api_key": KEY, "size": 4}}
    agent = {"rollout": {"user_workflow": "a->B"}, "more": [KEY, {"password": "x"}]}
    aux = {"explorer": {"auxiliary_models": [{"api_key": KEY}]}, "service": {"token": KEY}, "buffer": {}}
    for raw in ({"ajet": below | agent}, {"astuner": below}, aux):
        rows = translate(raw, Path("/nowhere/x.yaml")).rows
        assert KEY not in repr(rows)
        (shown,) = (row.value for row in rows if row.place.rpartition(".")[2] in ("api_key", "token"))
        assert shown == ("$OF_THE_USER" if is_variable else "[secret]")
    (row,) = (row for row in translate({"ajet": below | agent}, None).rows if row.use == "rollout.agent.config")
    assert row.made["ajet"]["board"] == {"api_key": None, "size": 4}


def test_a_trinity_file_names_the_command_that_makes_its_script(tmp_path: Path) -> None:
    (tmp_path / "tuner.yaml").write_text("algorithm: {repeat_times: 4}\nbuffer: {batch_size: 2}\n")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "tuner.yaml")
    assert f"`flywheel migrate {tmp_path}/tuner.yaml --output DIR` writes a script" in str(refused.value)
    assert "flywheel.tuner.tune" in str(refused.value)
    found = translate({"algorithm": {"repeat_times": 4}, "buffer": {"batch_size": 2}, "mode": "train"}, None)
    assert (found.program, [(row.place, row.use) for row in found.refused]) == (
        "Trinity-RFT",
        [("mode", ""), ("model.model_path", "model.base"), (f"{TASKSET}.path", "train_dataset.path")],
    )
    assert found.settings == {"training": {"group_size": 4, "prompts_per_step": 2}}


def test_a_missing_value_is_a_refused_row_with_the_key_to_fill_in() -> None:
    hub = {"task_reader": {"type": "huggingface_dat_repo"}}
    found = translate({"ajet": hub}, None)
    assert [(row.place, row.value, row.use) for row in found.refused] == [
        ("ajet.task_reader.huggingface_dat_repo.dataset_path", None, "sources.0.dataset.path"),
        ("ajet.model.path", None, "model.base"),
    ]
