"""What a file of another program means is what Flywheel's own file has that is written of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, load
from flywheel.config.translation import translate
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
