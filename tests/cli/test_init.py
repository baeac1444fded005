"""`flywheel init`: four answers become a configuration that loads, with its comments."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flywheel.cli.init import BASE, JUDGE, SERVER, InitAnswers, _answers, _files_to_write, configured
from flywheel.config.file import load, parse
from flywheel.errors import EXIT_FAILED, EXIT_USAGE
from flywheel.system import files
from flywheel.system.yaml_file import read_yaml
from tests.cli.conftest import Run
from tests.cli.terminal import in_terminal

DEFAULTS = InitAnswers("otlp", JUDGE, BASE, SERVER)
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
    other = load(tmp_path / "second" / "flywheel.yaml")
    assert (config.state_dir, other.state_dir) == (tmp_path / "first" / "state", tmp_path / "second" / "state")
    [source] = other.sources
    assert source.type == "studio" and source.path == studio


@pytest.mark.slow
def test_options_answer_instead(flywheel: Run, tmp_path: Path) -> None:
    options = ["--source", "my replies.jsonl", "--judge", "http://127.0.0.1:9/v1 a-judge", "--base", "./my model: x"]
    assert flywheel("init", ".", *options, "--server", "http://127.0.0.1:7777").code == 0
    config = load(tmp_path / "flywheel.yaml")
    [source] = config.sources
    assert source.type == "jsonl" and source.path.name == "my replies.jsonl"
    assert (config.judge.base_url, config.judge.model) == ("http://127.0.0.1:9/v1", "a-judge")
    assert config.model.base == str(tmp_path / "my model: x")
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
    text = configured(
        SHIPPED, InitAnswers(f"/{path}.jsonl", f"http://127.0.0.1:9/v1 {model}", base, SERVER), Path("state")
    )
    found = yaml.safe_load(text)
    assert (found["model"]["base"], found["judge"]["model"]) == (base, model)
    assert found["sources"] == [{"type": "jsonl", "path": f"/{path}.jsonl"}]


@pytest.mark.parametrize("source", ["otlp", "calls", "/a/studio.sqlite", "/a/tasks.jsonl"])
def test_every_kind_of_source_is_a_configuration(tmp_path: Path, source: str) -> None:
    path = tmp_path / "flywheel.yaml"
    path.write_text(configured(SHIPPED, InitAnswers(source, JUDGE, BASE, SERVER), Path("state")))
    assert parse(read_yaml(path, "read", "").value, "test", tmp_path).sources


@pytest.mark.slow
def test_on_a_terminal_it_asks_four_questions(tmp_path: Path) -> None:
    # What cannot be used is asked again, and a judge without a model is asked about.
    judges = "gpt-4o", "http://127.0.0.1:9/v1", ""
    answers = ["folder", "calls", *judges, "no model", "models/mine", "/a", "http://127.0.0.1:9"]
    (tmp_path / "folder").mkdir()
    typed = "".join(f"{each}\n" for each in answers).encode()
    seen = in_terminal(tmp_path, ["init"], columns=200, home=tmp_path, typed=typed)
    assert seen.code == 0, seen.screen
    for told in (
        "otlp   spans that the agents send", "calls  the call log of `flywheel serve`",
        "folder is no file that can be read",
        "gpt-4o is no URL", "gpt-4o-mini would be used", "no model is neither a hub name", "/a is no URL",
    ):  # fmt: skip
        assert told in seen.screen
    config = load(tmp_path / "flywheel.yaml")
    assert config.sources[0].type == "calls" and config.model.base == "models/mine"
    assert config.serving.urls == ["http://127.0.0.1:9"]
    assert (config.judge.base_url, config.judge.model) == ("http://127.0.0.1:9/v1", "gpt-4o-mini")


@pytest.mark.parametrize(
    ("typed", "judge"),
    [
        ([""], JUDGE),
        (["http://127.0.0.1:9/v1 a-judge"], "http://127.0.0.1:9/v1 a-judge"),
        (["http://127.0.0.1:9/v1", ""], "http://127.0.0.1:9/v1"),
        (["http://127.0.0.1:8/v1", "http://127.0.0.1:9/v1", ""], "http://127.0.0.1:9/v1"),
        (["http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1 a-judge"], "http://127.0.0.1:9/v1 a-judge"),
    ],
)
def test_a_judge_without_a_model_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: list[str], judge: str
) -> None:
    left = iter(typed)

    def prompt(question: str, *, default: str, value_proc: Callable[[str], str]) -> str:
        return value_proc(next(left) or default)

    monkeypatch.setattr("typer.prompt", prompt)
    options = {"source": "otlp", "judge": None, "base": BASE, "server": SERVER}
    assert _answers(options, Path(), asks=True).judge == judge
    assert next(left, None) is None
    doubt = "no model after the URL: gpt-4o-mini would be used."
    assert capsys.readouterr().out.count(doubt) == len(typed) - 1


@pytest.mark.parametrize(
    ("option", "answer", "why"),
    [
        ("--source", ".", "is no file that can be read"),
        ("--source", "notes.txt", "is no Studio database"),
        ("--judge", "gpt-4o", "gpt-4o is no URL"),
        ("--judge", "http://127.0.0.1:9/v1 a model", "is not a URL and the name of a model"),
        ("--base", "org/model/x", "neither a hub name"),
        ("--server", "127.0.0.1:8000", "is no URL"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_and_nothing_is_written(
    flywheel: Run, tmp_path: Path, option: str, answer: str, why: str
) -> None:
    (tmp_path / "notes.txt").write_text("this is no database at all")
    ran = flywheel("init", "new", option, answer if option != "--source" else str(tmp_path / answer))
    assert ran.code == EXIT_USAGE
    assert why in " ".join(re.sub(r"[│╭╮╰╯─]", " ", ran.err).split())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("folder", "state"),
    [
        ("here", "/var/lib/flywheel"),
        ("/etc/flywheel", "/var/lib/flywheel"),
        ("/etc/flywheel/a", "/var/lib/flywheel/a"),
    ],
)
def test_the_units_and_the_configuration_name_the_same_state(tmp_path: Path, folder: str, state: str) -> None:
    written = {str(path): text for path, text in _files_to_write(tmp_path / folder, DEFAULTS, systemd=True)}
    assert yaml.safe_load(written["flywheel.yaml"])["state"] == {"dir": state}
    unit = written["systemd/flywheel@.service" if folder.endswith("/a") else "systemd/flywheel.service"]
    [home] = re.findall(r"^Environment=FLYWHEEL_HOME=(\S+)$", unit, re.MULTILINE)
    assert home.replace("%S", "/var/lib").replace("%i", "a") == state
    assert f"StateDirectory={home.removeprefix('%S/')}" in unit


@pytest.mark.slow
def test_a_state_of_another_configuration_is_named_before_it_is_used(flywheel: Run, tmp_path: Path) -> None:
    """A file that was moved or copied with its state is no other one."""
    one, other, home = tmp_path / "one.yaml", tmp_path / "other.yaml", tmp_path / "home"
    for path in (one, other):
        path.write_text("sources: []\n")
    for command in (["ingest"], ["filter"]):
        assert "shares the state" not in flywheel(*command, "-c", one).err
        for _ in range(2):
            ran = flywheel(*command, "-c", other)
            assert ran.code == 0 and f"{other} shares the state {home} with {one}" in ran.err
    assert "shares the state" in flywheel("filter", "--dry-run", "-c", other).err
    assert "shares the state" in flywheel("run", "--once", "-c", other).err
    one.rename(tmp_path / "moved.yaml")
    assert "shares the state" not in flywheel("ingest", "-c", tmp_path / "moved.yaml").err
    other.write_text("sources: []\nstate: {dir: own}\n")
    (tmp_path / "copy").mkdir()
    assert flywheel("ingest", "-c", other).code == 0
    shutil.copy(other, tmp_path / "copy")
    shutil.copytree(tmp_path / "own", tmp_path / "copy" / "own")
    assert "shares the state" not in flywheel("ingest", "-c", tmp_path / "copy" / "other.yaml").err
