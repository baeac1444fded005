"""The production configuration of `flywheel docs install` can be copied as it stands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from flywheel.config.file import load
from flywheel.judge.filters.chain import load_chain
from flywheel.judge.rubric.file import load_rubric
from flywheel.system.server_limits import is_loopback

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate" / "install.md").read_text()
SECTION = PAGE.split("## A production configuration")[1].split("\n## ")[0]


def block(kind: str) -> str:
    [only] = re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL)
    return str(only)


def test_it_loads_beside_the_files_of_init_with_the_keys_that_its_environment_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLYWHEEL_HOME", raising=False)
    for folder in ("rubrics", "filters"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "flywheel.yaml").write_text(block("yaml"))
    config = load(tmp_path / "flywheel.yaml")
    assert config.filter.rubric is not None and config.filter.chain is not None
    load_rubric(Path(config.filter.rubric))
    load_chain(Path(config.filter.chain))
    assert str(config.state_dir) == "/var/lib/flywheel", "as the units have it"
    assert not is_loopback(config.serving.host)
    [notify] = config.notify
    named = {
        config.judge.api_key_env, config.serving.api_key_env, config.serving.admin_key_env, notify.url_env,
        notify.secret_env,
    }  # fmt: skip
    assert set(re.findall(r"^(\w+)=$", block("text"), re.MULTILINE)) == named
    assert set(notify.on) >= {"passed", "rolled_back", "judge_failing"}
