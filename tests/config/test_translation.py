"""What a file of another program means is what Flywheel's own file has that is written of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, load
from flywheel.config.translation import translate
from flywheel.config.trinity import TASKSET
from flywheel.daemon.evaluation import Grader
from flywheel.daemon.judging.judge_setup import judge_settings, rubric_of
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import chain_of
from flywheel.secrets import without_secrets
from tests.factories.foreign_files import foreign_files

FILES = dict(foreign_files())


def effective(config: Config) -> tuple[Any, ...]:
    """All settings, and by what tasks are judged."""
    chain = chain_of(config)
    grader = Grader(rubric_of(config, chain), judge_settings(config, chain))
    settings = config.model_dump(mode="json")
    # Where a rubric is written is not what it says.
    del settings["filter"]["rubric"]
    return settings, grader.rubric.hash, grader.judge_hash, chain and chain.hash


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_is_what_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYWHEEL_HOME", str(tmp_path / "state"))
    file, own = tmp_path / "theirs.yaml", tmp_path / "flywheel.yaml"
    file.write_text(yaml.safe_dump(FILES[name]))
    found = translate(yaml.safe_load(file.read_text()), file)
    if found.refused:
        with pytest.raises(ConfigError, match=r"refused|See `flywheel docs"):
            load(file)
        return
    config = load(file)
    assert (found.project.folder if found.project else tmp_path) == tmp_path
    for path, rubric in found.rubrics.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(yaml.safe_dump(rubric, sort_keys=False))
    own.write_text(yaml.safe_dump(without_secrets(found.settings), sort_keys=False))
    assert effective(load(own)) == effective(config)


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
