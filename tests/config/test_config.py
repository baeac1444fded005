"""Settings: strict, with errors that name the key and what was meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flywheel.config.file import Config, default_state_dir, defaults, load, parse
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.errors import ConfigError
from flywheel.system import files
from tests.factories.config import MISTAKES

ROOT = Path(__file__).parent.parent.parent


def load_text(folder: Path, text: str | bytes) -> Config:
    """Read a configuration from a file with this content."""
    path = folder / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"judge": {"max_threads": 3}}, r"unknown key `judge\.max_threads` \(did you mean `max_thread`\?\)"),
        ({"sources": [{"pth": "x"}]}, r"unknown key `sources\.0\.pth` \(did you mean `path`\?\)"),
        (
            {"sources": [{"type": "otlp", "pth": "x"}]},
            r"unknown key `sources\.0\.pth` \(known here: listen, models, t",
        ),
        (
            {"sources": [{"type": "otlp", "listen": "http://127.0.0.1:4318"}]},
            r"`sources\.0\.listen`: .*'http://127\.0\.0\.1:4318' is not HOST:PORT",
        ),
        (
            {"sources": [{"type": "csv"}]},
            r"`sources\.0\.type`: there is no type `csv`; it is one of `studio`, `jsonl`",
        ),
        ({"sources": [{"type": "jsonl"}]}, r"`sources\.0\.path`: it is required"),
        ({"training": {"lora": {"rank": 3}}}, r"unknown key `training\.lora\.rank`"),
        ({"serving": {"probe_tolerance": 0.1}}, r"unknown key `serving\.probe_tolerance`"),
        ({"targets": {"a": {"rubrik": "r"}}}, r"unknown key `targets\.a\.rubrik` \(did you mean `rubric`\?\)"),
        ({"judgement": {}}, r"unknown key `judgement` \(did you mean `judge`\?\)"),
        ({"trigger": {"min_samples": "many"}}, r"`trigger\.min_samples`: it must be a whole number, not `many`"),
        ({"training": {"group_size": 3}}, r"`training\.group_size`: .*4"),
        ({"training": {"lora": {"r": 7}}}, r"`training\.lora\.r`"),
        ({"gate": {"confidence": 2}}, r"`gate\.confidence`"),
        ({"trigger": {"cron": "not a cron"}}, r"`trigger\.cron`"),
        ([1], "its root is a list"),
    ],
)
def test_what_is_wrong_is_named(raw: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse(raw, "c.yaml", Path())
    assert caught.value.exit_code == 78


PYDANTIC_WORDS = re.compile(
    "input should|dictionary|instance|class|string|boolean|item after|constrained", re.IGNORECASE
)


def test_unusual_mistakes_are_told_in_plain_words() -> None:
    for raw in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            parse(raw, "c.yaml", Path())
        assert not PYDANTIC_WORDS.search(caught.value.why), (raw, caught.value.why)


def test_a_text_in_the_wrong_place_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"serving": {"urls": "http://me:s3cret@host"}}, "c.yaml", Path())
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [(b"a: [", "not YAML"), (b"\xff\xfe\xff", "not UTF-8"), (b"- a", "root is a list")],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: bytes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_text(tmp_path, text)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such file.*flywheel init"):
        load(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path)


def test_paths_are_relative_to_the_file_and_tilde_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_text(
        tmp_path,
        "sources: [{path: db/a.sqlite}, {path: ~/b.sqlite}]\n"
        "filter: {rubric: r.yaml}\nstate: {dir: state}\nmodel: {base: ./policy}\n",
    )
    assert [source.path for source in config.sources] == [tmp_path / "db/a.sqlite", Path("/home/somebody/b.sqlite")]
    assert config.filter.rubric == tmp_path / "r.yaml"
    assert config.state_dir == tmp_path / "state"
    assert config.model.base == str(tmp_path / "policy")
    assert config.task_file == tmp_path / "state" / "tasks.jsonl"


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, "")
    assert config.filter.rubric.exists()
    assert config.model.base == Config().model.base


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLYWHEEL_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert default_state_dir() == Path("/xdg/flywheel")
    monkeypatch.setenv("FLYWHEEL_HOME", "/fly")
    assert default_state_dir() == Path("/fly")


def test_settings_survive_the_way_to_the_worker(tmp_path: Path) -> None:
    config = parse({"judge": {"model": "j"}, "model": {"base": "/m"}}, "c", tmp_path)
    assert Config.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("path", sorted((files.shipped_folder() / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    load(path)


@pytest.mark.parametrize(("name", "base", "rank"), [("development", "1.5B", 16), ("production", "7B", 64)])
def test_the_configurations_for_development_and_production_have_their_model_and_rank(
    name: str, base: str, rank: int
) -> None:
    config = load(ROOT / "configs" / f"{name}.yaml")
    assert base in config.model.base
    assert (config.training.lora.r, config.training.lora.alpha, config.serving.max_lora_rank) == (
        rank,
        2 * rank,
        rank,
    )
    assert config.training.stages == ["sft", "grpo"]
    assert config.filter.rubric is not None
    assert config.filter.rubric.is_file()


def test_every_shipped_configuration_is_named_on_the_page() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert all(f"`{path.name}`" in text for path in (ROOT / "configs").glob("*.yaml"))


def test_a_key_that_is_written_twice_is_an_error(tmp_path: Path) -> None:
    text = "trigger: {min_samples: 5}\njudge:\n  model: a\n  model: b\ntrigger: {cron_min_samples: 2}\n"
    with pytest.raises(ConfigError, match=r"`trigger` is written twice, on line 1 and on line 5") as caught:
        load_text(tmp_path, text)
    assert "`judge.model` is written twice, on line 3 and on line 4" in str(caught.value)
    assert load_text(tmp_path, "trigger: {<<: {min_samples: 5}, min_samples: 6}").trigger.min_samples == 6


@pytest.mark.parametrize("path", ["~no-such-user-here/x", '"a\\0b"', "x" * 300])
@pytest.mark.parametrize("key", ["state: {{dir: {}}}", "sources: [{{path: {}}}]", "filter: {{rubric: {}}}"])
def test_a_path_that_no_file_can_have_is_named(tmp_path: Path, key: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"`(state.dir|sources.0.path|filter.rubric)`: (the home|a NUL|it is too)"):
        load_text(tmp_path, key.format(path))


def test_half_a_character_is_refused_and_two_halves_are_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="half of a character"):
        load_text(tmp_path, 'model: {alias: "\\ud83d"}')
    assert load_text(tmp_path, 'model: {alias: "\\ud83d\\ude00"}').model.alias == "😀"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of whom the system knows nothing, as in many containers."""

    def unknown(_uid: int) -> object:
        raise KeyError

    for name in ("HOME", "FLYWHEEL_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_directory_only_what_needs_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="home directory"):
        defaults()
    config = parse({"sources": [{"path": "a"}]}, "c.yaml", tmp_path)
    with pytest.raises(ConfigError, match=r"home directory.*state\.dir, or \$XDG_STATE_HOME"):
        _ = config.state_dir
    monkeypatch.setenv("FLYWHEEL_HOME", "~nobody-at-all/x")
    with pytest.raises(ConfigError, match=r"home directory.*state\.dir, or \$FLYWHEEL_HOME"):
        _ = config.state_dir
    assert parse({"sources": [], "state": {"dir": "s"}}, "c.yaml", tmp_path).state_dir == tmp_path / "s"


@pytest.mark.parametrize("home", ["home", "elsewhere/../home"])
def test_a_task_file_in_the_default_place_is_not_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLYWHEEL_HOME", home)
    for path in ("home", "home/tasks.jsonl"):
        with pytest.raises(ConfigError, match=rf"tasks\.jsonl is read by the source .*/{path}\. .*`ingest\.output`"):
            parse({"sources": [{"type": "jsonl", "path": path}]}, "test", tmp_path)
    raw = {"sources": [{"type": "jsonl", "path": "home"}], "ingest": {"output": "tasks.jsonl"}}
    assert parse(raw, "test", tmp_path).task_file == tmp_path / "tasks.jsonl"


def test_a_state_directory_that_cannot_be_found_is_told_by_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYWHEEL_HOME", "~nobody-at-all/x")
    config = parse({"sources": [{"type": "jsonl", "path": "data"}]}, "test", tmp_path)
    with pytest.raises(ConfigError, match="FLYWHEEL_HOME"):
        _ = config.state_dir


def test_a_hidden_task_file_in_a_directory_of_lines_is_never_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    raw: dict[str, Any] = {"sources": [{"type": "jsonl", "path": "data"}], "ingest": {"output": "data/.tasks.jsonl"}}
    assert parse(raw, "test", tmp_path).task_file == data / ".tasks.jsonl"
    (data / "link.jsonl").symlink_to(".tasks.jsonl")
    (tmp_path / "out.jsonl").symlink_to("data/tasks.jsonl")
    for output in ("data/link.jsonl", "data/tasks.jsonl", "out.jsonl"):
        with pytest.raises(ConfigError, match="is read by the source"):
            parse(raw | {"ingest": {"output": output}}, "test", tmp_path)


def test_each_problem_of_a_file_comes_with_its_line(tmp_path: Path) -> None:
    text = (
        "sources:\n  - path: a.sqlite\n  - type: jsonl\n    pth: b\n"
        "judge:\n  modell: x\ntraining: {steps: -1}\nbogus: 1\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_text(tmp_path, text)
    told = [problem.split("`")[:2] for problem in raised.value.why.split("; ")]
    assert told == [
        ["line 3: ", "sources.1.path"],
        ["line 4: unknown key ", "sources.1.pth"],
        ["line 6: unknown key ", "judge.modell"],
        ["line 7: ", "training.steps"],
        ["line 8: unknown key ", "bogus"],
    ]


def test_no_line_is_told_of_what_was_translated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_text(tmp_path, "astuner:\n  feedback_tracing:\n    base_url: a.sqlite\n    train_ratio: 2\n")
    assert "line" not in raised.value.why


def test_paths_beside_the_file_s_folder_have_no_detour(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    raw = {
        "state": {"dir": "../state"},
        "sources": [{"path": "../studio.sqlite"}, {"type": "jsonl", "path": "../lines"}],
        "ingest": {"output": "../out.jsonl"},
        "filter": {"rubric": "../rubrics/mine.yaml", "chain": "../filters/mine.yaml"},
    }
    config = parse(raw, "x", configs)
    assert [source.path for source in config.sources] == [tmp_path / "studio.sqlite", tmp_path / "lines"]  # type: ignore[union-attr]
    assert (config.state_dir, config.task_file) == (tmp_path / "state", tmp_path / "out.jsonl")
    assert config.filter.rubric == tmp_path / "rubrics" / "mine.yaml"
    assert config.filter.chain == tmp_path / "filters" / "mine.yaml"


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"rollout": {"reward": {"workflow": 1}}}, "reward.workflow is for your own agent"),
        ({"rollout": {"setup": "a.py:prepare"}}, "setup is for your own agent"),
        (
            {"rollout": {"agent": {"workflow": "a.py:run"}, "reward_function": "a.py:judge"}},
            "reward_function has no effect while reward.workflow is 0",
        ),
        (
            {
                "rollout": {"agent": {"workflow": "a.py:run"}, "reward": {"rubric": 0, "workflow": 1}},
                "gate": {"non_inferiority_margins": {"safe": 0.1}},
            },
            "non_inferiority_margins are about criteria of the rubric",
        ),
    ],
)
def test_settings_of_the_users_agent_have_an_effect_or_are_refused(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(why)):
        Config.model_validate(sections)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gate: {min_gain: 5}", "`gate.min_gain`: scores of a rubric lie between 0 and 1, and no gain is above 5"),
        ("judge:\n  base_url: localhost:8000/v1", "line 2: `judge.base_url`: it must begin with http:// or https://"),
        ("judge:\n  backup:\n    base_url: x", "line 3: `judge.backup.base_url`: it must begin with http://"),
        (
            "model: {base: Qwen/Qwen3-4B, alias: Qwen/Qwen3-4B}",
            "the alias Qwen/Qwen3-4B is the name of the base model",
        ),
        ("model: {base: /models/tiny, alias: tiny}", "the alias tiny is the name of the base model"),
        ("model: {base: /models/tiny}\ntargets: {tiny: {}}", "the alias tiny is the name of the base model"),
        ("training:\n  lora:\n    rank: 8", "line 3: unknown key `training.lora.rank` (did you mean `r`?)"),
    ],
)
def test_what_could_never_work_is_refused_when_the_file_is_read(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load_text(tmp_path, text)


def test_a_gain_above_one_is_possible_where_the_workflow_gives_the_reward(tmp_path: Path) -> None:
    raw = {
        "gate": {"min_gain": 5},
        "rollout": {"agent": {"command": ["agent"]}, "reward": {"rubric": 0, "workflow": 1}},
    }
    assert parse(raw, "c", tmp_path).gate.min_gain == 5


@pytest.mark.parametrize("key", ["rubric", "chain"])
def test_a_file_that_is_missing_is_named_with_the_line_of_the_configuration(tmp_path: Path, key: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"judge: {{model: j}}\nfilter:\n  # ours\n  {key}: none.yaml\n")
    with pytest.raises(ConfigError, match="there is no such file") as caught:
        rubric_of(load(path))
    assert caught.value.hint == f"Correct filter.{key} on line 4 of {path}."
