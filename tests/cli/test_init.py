"""`flywheel init`: four answers become a configuration that loads, with its comments."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flywheel import files
from flywheel.cli.init import BASE, JUDGE, SERVER, Answers, configured
from flywheel.config import load, parse
from flywheel.errors import EXIT_FAILED
from flywheel.yaml_file import read_yaml
from tests.cli.conftest import Run

WAIT_SECONDS = 120
SHIPPED = (files.shipped_folder() / "configs" / "flywheel.yaml").read_text().replace("../", "")


def test_what_nobody_is_asked_is_found_or_the_default(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ran = flywheel("init", "--yes", "first")
    assert ran.code == 0
    assert re.search(r"^failed +judge ", ran.out, re.MULTILINE), "it ends with what the doctor finds"
    config = load(tmp_path / "first" / "flywheel.yaml")
    assert [each.type for each in config.sources] == ["otlp"]
    assert (f"{config.judge.base_url} {config.judge.model}", config.model.base) == (JUDGE, BASE)
    studio = tmp_path / "home" / "AgentScope-Studio" / "database.sqlite"
    studio.parent.mkdir(parents=True)
    studio.touch()
    assert flywheel("init", "--yes", "second").code == 0
    [source] = load(tmp_path / "second" / "flywheel.yaml").sources
    assert source.type == "studio" and source.path == studio


def test_options_answer_instead(flywheel: Run, tmp_path: Path) -> None:
    options = ["--source", "my replies.jsonl", "--judge", "http://127.0.0.1:9/v1 a-judge", "--base", "org/model: x"]
    assert flywheel("init", ".", *options, "--server", "http://127.0.0.1:7777").code == 0
    config = load(tmp_path / "flywheel.yaml")
    [source] = config.sources
    assert source.type == "jsonl" and source.path.name == "my replies.jsonl"
    assert (config.judge.base_url, config.judge.model) == ("http://127.0.0.1:9/v1", "a-judge")
    assert config.model.base == "org/model: x"
    assert config.serving.urls == ["http://127.0.0.1:7777"]
    text = (tmp_path / "flywheel.yaml").read_text()
    assert "# the model name that your agents call" in text and "# yaml-language-server" in text
    before = text
    assert flywheel("init", ".", "--yes").code == 0
    refused = flywheel("init", ".", "--base", "other")
    assert refused.code == EXIT_FAILED and "it exists" in refused.err
    assert (tmp_path / "flywheel.yaml").read_text() == before


TEXTS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1).filter(lambda text: not text.isspace())


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(base=TEXTS, model=TEXTS, path=TEXTS)
def test_every_answer_is_what_is_read_back(base: str, model: str, path: str) -> None:
    text = configured(SHIPPED, Answers(f"/{path}.jsonl", f"http://127.0.0.1:9/v1 {model}", base, SERVER))
    found = yaml.safe_load(text)
    assert (found["model"]["base"], found["judge"]["model"]) == (base, model)
    assert found["sources"] == [{"type": "jsonl", "path": f"/{path}.jsonl"}]


@pytest.mark.parametrize("source", ["otlp", "calls", "/a/studio.sqlite", "/a/tasks.jsonl"])
def test_every_kind_of_source_is_a_configuration(tmp_path: Path, source: str) -> None:
    path = tmp_path / "flywheel.yaml"
    path.write_text(configured(SHIPPED, Answers(source, JUDGE, BASE, SERVER)))
    assert parse(read_yaml(path, "read", "").value, "test", tmp_path).sources


@pytest.mark.slow
def test_on_a_terminal_it_asks_four_questions(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flywheel", "init"],
        cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
    )  # fmt: skip
    os.close(theirs)
    said = ""
    answers = iter(["calls", "", "models/mine", "http://127.0.0.1:9"])
    until = time.monotonic() + WAIT_SECONDS
    try:
        while time.monotonic() < until:
            try:
                said += os.read(ours, 4096).decode()
            except OSError:
                break
            if said.rstrip(" ").endswith("]:"):
                os.write(ours, f"{next(answers)}\n".encode())
                said += "\n"
        assert process.wait(WAIT_SECONDS) == 0, said
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert next(answers, None) is None, said
    config = load(tmp_path / "flywheel.yaml")
    assert config.sources[0].type == "calls" and config.model.base == "models/mine"
    assert config.serving.urls == ["http://127.0.0.1:9"] and config.judge.model == "gpt-4o-mini"
