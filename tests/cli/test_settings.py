"""`flywheel config`: settings with their origin, without secrets; and the schemas of the files that users edit."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema_rs import Draft202012Validator, meta

from flywheel.cli.settings import SCHEMAS, schema_of
from flywheel.config.file import Config, parse
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import FILTERS, load_chain
from tests.cli.conftest import Run
from tests.factories.config import MISTAKES, told_settings

ROOT = Path(__file__).parent.parent.parent
KEY = "sk-0123456789abcdef"


def test_each_setting_has_its_value_in_effect_and_its_origin(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    (tmp_path / "flywheel.yaml").write_text(
        "judge:\n  model: grader\n  max_thread: 3\nsources:\n  - path: a.sqlite\n  - {type: jsonl, path: b.jsonl}\n"
    )
    ran = flywheel("config", "show", "--json")
    assert ran.json["file"] == str(tmp_path / "flywheel.yaml")
    found = told_settings(ran)
    assert found["judge.model"] == ("grader", "given")
    assert found["judge.max_thread"] == (3, "given")
    assert found["sources.0.path"] == (str(tmp_path / "a.sqlite"), "given")
    assert found["sources.1.type"] == ("jsonl", "given")
    assert found["judge.max_attempts"] == (5, "default")
    assert found["judge.base_url"] == ("http://127.0.0.1:9/v1", "$OPENAI_BASE_URL")
    assert found["state.dir"] == (str(tmp_path / "home"), "$FLYWHEEL_HOME")
    assert found["tracking.dir"] == (str(tmp_path / "home" / "tracking"), "default")
    assert found["ingest.output"] == (str(tmp_path / "home" / "tasks.jsonl"), "default")
    assert found["judge.api_key_env"] == ("OPENAI_API_KEY", "default; not set: $OPENAI_API_KEY")
    lines = flywheel("config", "show").out.splitlines()
    assert any(line.split() == ["judge.max_thread", "3", "given"] for line in lines)


def test_settings_by_name_are_shown_each(flywheel: Run, tmp_path: Path) -> None:
    file = tmp_path / "flywheel.yaml"
    (tmp_path / "suite.jsonl").write_text('{"question": "1+1?"}\n')
    file.write_text(
        "targets:\n  a: {}\n  b:\n    rubric: own.yaml\ngate:\n  suites:\n    sums:\n      file: suite.jsonl\n"
    )
    found = told_settings(flywheel("config", "show", "--json"))
    assert found["targets.a.rubric"] == (None, "default")
    assert found["targets.b.rubric"] == (str(tmp_path / "own.yaml"), "given")
    assert found["gate.suites.sums.file"] == (str(tmp_path / "suite.jsonl"), "given")
    assert "targets.b.rubric" in flywheel("config", "show").out


def test_a_suite_that_is_too_small_is_refused_with_the_size_that_is_needed(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "suite.jsonl").write_text('{"question": "1+1?"}\n')
    (tmp_path / "flywheel.yaml").write_text(
        "judge: {base_url: 'http://127.0.0.1:9/v1', model: m}\n"
        "gate: {suites: {sums: {file: suite.jsonl, margin: 0.1}}}\n"
    )
    for command in (["config", "show"], ["round"], ["run", "--once"]):
        flywheel(*command).fails(78, "suite.jsonl has 1 different conversation, and 41 are needed")
    found = {each["name"]: each for each in flywheel("doctor", "--json").json["checks"]}
    assert found["suite"]["result"] == "failed"
    assert "and 41 are needed" in found["suite"]["found"]


def test_the_next_times_of_a_schedule_are_shown_in_utc(flywheel: Run, tmp_path: Path) -> None:
    assert flywheel("config", "show", "--json").json["next_cron_times"] == []
    assert flywheel("status", "--json", "--set", "sources=[]").json["next_cron_times"] == []
    assert "cron " not in flywheel("status").out
    (tmp_path / "flywheel.yaml").write_text("trigger: {cron: 30 3 29 2 *}\n")
    for command in (["config", "show"], ["status"]):
        times = [datetime.fromisoformat(at) for at in flywheel(*command, "--json").json["next_cron_times"]]
        assert [(f"{at:%m-%d %H:%M}", at.tzinfo) for at in times] == [("02-29 03:30", UTC)] * 3, command
        assert times[0] < times[1] < times[2]
        shown = ", ".join(f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in times)
        assert shown in " ".join(flywheel(*command).out.split()), command


def test_every_key_is_shown(flywheel: Run) -> None:
    def keys(model: Any, above: str = "") -> set[str]:
        inner = {name: getattr(model, name) for name in type(model).model_fields}
        nested = {name: value for name, value in inner.items() if hasattr(value, "model_fields_set")}
        found = {f"{above}{name}" for name in inner if name not in nested}
        return found.union(*(keys(value, f"{above}{name}.") for name, value in nested.items()))

    shown = told_settings(flywheel("config", "show", "--json"))
    assert set(shown) - {key for key in shown if key.startswith("sources.")} == keys(Config()) - {"sources"}
    assert {key for key in shown if key.startswith("sources.")} > {"sources.0.type", "sources.0.path"}


def test_a_file_of_agentjet_has_the_origins_of_its_own_keys(flywheel: Run, tmp_path: Path) -> None:
    file = tmp_path / "tutorial" / "sums" / "sums.yaml"
    file.parent.mkdir(parents=True)
    (file.parent / "agent.py").touch()
    file.write_text(
        "ajet:\n"
        "  model: {path: ./models/mine}\n"
        "  rollout:\n"
        "    user_workflow: tutorial.sums.agent->Sums\n"
        "    num_repeat: 6\n"
        "    temperature: 0.7\n"
        "  task_reader:\n"
        "    jsonl: {training: {file_path: lines.jsonl}}\n"
        "    feedback_tracing:\n"
        "      base_url: data/db.sqlite\n"
        "      train_output_path: /data/tasks.jsonl\n"
        "rollout: {temperature: 0.5}\n"
    )
    ran = flywheel("config", "show", "--json", "-c", file)
    why = "where tutorial/ is"
    assert ran.json["project"] == {"root": str(tmp_path), "why": why}
    found, tracing = told_settings(ran), "ajet.task_reader.feedback_tracing"
    assert found["model.base"] == (str(tmp_path / "models/mine"), "ajet.model.path")
    assert found["sources.0.path"] == (str(tmp_path / "data/db.sqlite"), f"{tracing}.base_url")
    assert found["ingest.output"] == ("/data/tasks.jsonl", f"{tracing}.train_output_path")
    assert found["rollout.agent.workflow"] == ("tutorial.sums.agent->Sums", "ajet.rollout.user_workflow")
    assert found["rollout.reward.workflow"] == (1.0, "ajet.rollout.user_workflow")
    assert found["training.group_size"] == (6, "ajet.rollout.num_repeat")
    assert found["rollout.temperature"] == (0.5, "given"), "Flywheel's own key takes precedence"
    assert found["judge.base_url"] == (
        "https://dashscope.aliyuncs.com/compatible-mode/v1",
        "AgentJet's default",
    )
    assert found["judge.backup.api_key_env"][1].startswith("AgentJet's default; ")
    assert (
        f"Relative paths start at the project root {tmp_path}, {why}." in flywheel("config", "show", "-c", file).out
    )
    file.write_text(file.read_text().replace("./models/mine", "Qwen/Qwen3-4B"))
    of_the_hub = flywheel("config", "show", "--json", "-c", file)
    assert told_settings(of_the_hub)["model.base"] == ("Qwen/Qwen3-4B", "ajet.model.path"), "no path"


def test_a_split_that_a_data_set_of_agentjets_does_not_name_is_of_its_section(flywheel: Run, tmp_path: Path) -> None:
    file, reader = tmp_path / "hub.yaml", "ajet.task_reader.huggingface_dat_repo"
    file.write_text(
        "ajet:\n"
        "  task_reader:\n"
        "    huggingface_dat_repo: {dataset_path: of/sums}\n"
        "    type: huggingface_dat_repo\n"
        "  model: {path: of/model}\n"
    )
    found = told_settings(flywheel("config", "show", "--json", "-c", file))
    shown = [found[f"sources.{number}.dataset.split"] for number in range(2)]
    assert shown == [("train", reader), ("validation", reader)]


def test_what_agentjet_takes_is_said_with_the_settings_and_at_the_start_of_a_run(
    flywheel: Run, tmp_path: Path
) -> None:
    """Of two sources of Flywheel's own, one says whose replies count."""
    file = tmp_path / "agentjet.yaml"
    file.write_text(
        "feedback_tracing: {}\n"
        "model: {base: some/model}\n"
        "state: {dir: state}\n"
        "serving: {urls: ['http://127.0.0.1:1']}\n"
        "training: {inexact_prompts: leave-out}\n"
        "sources:\n"
        "  - {type: jsonl, path: a.jsonl}\n"
        "  - {type: jsonl, path: b.jsonl, models: {include: [mine]}}\n"
    )
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").touch()
    found = told_settings(flywheel("config", "show", "--json", "-c", file))
    assert found["sources.0.models.include"] == (["*"], "AgentJet's default")
    assert found["sources.1.models.include"] == (["mine"], "given")
    assert found["training.inexact_prompts"] == ("leave-out", "given")
    assert found["rollout.tools.uncalled"] == ("use", "AgentJet's default")
    said = (
        "as in AgentJet, where the file sets nothing: replies of every model count (sources[].models.include: ['*']);"
        " tasks whose tools were not called are used (rollout.tools.uncalled: use); replies are sent to the judge"
        " qwen3-235b-a22b-instruct-2507 at https://dashscope.aliyuncs.com/compatible-mode/v1 (judge.base_url)"
    )
    assert said in flywheel("run", "--once", "-c", file).err
    assert said in flywheel("filter", "-c", file).err
    # Before a question is asked, also where stdout is JSON.
    (tmp_path / "tasks.jsonl").write_text('{"main_query": "Who?", "answer": "Goethe", "verdict": "accept"}\n')
    (tmp_path / "rubric.yaml").write_text("id: r\ncriteria: [{id: right, value: It is right.}]\n")
    adapter, labels = ("--adapter", tmp_path / "adapter"), ("--labels", tmp_path / "tasks.jsonl")
    for command in (
        ("round", "-c", file),
        ("round", "-c", file, "--json"),
        ("round", "-c", file, *adapter),
        ("round", "-c", file, *adapter, "--json"),
        ("evaluate", "-c", file, "--model", "base", "--benchmark", tmp_path / "tasks.jsonl", "--estimate", "--json"),
        ("rubric", "calibrate", tmp_path / "rubric.yaml", *labels, "-c", file),
        ("rubric", "calibrate", tmp_path / "rubric.yaml", *labels, "-c", file, "--json"),
        ("rubric", "suggest", *labels, "-c", file),
    ):
        ran = flywheel(*command)
        assert (ran.err.count(said), ran.out.count(said)) == (1, 0), command
        assert "--json" not in command or isinstance(ran.json, dict)
    assert said not in flywheel("status", "-c", file).err
    file.write_text("model: {base: some/model}\nstate: {dir: other}\nsources: []\n")
    assert "AgentJet" not in flywheel("round", "-c", file).err


def test_a_database_of_agentjets_that_is_not_there_is_an_error(flywheel: Run, tmp_path: Path) -> None:
    text = "feedback_tracing: {base_url: ./data/db.sqlite}\nmodel: {base: some/model}\n"
    (tmp_path / "agentjet.yaml").write_text(text)
    ran = flywheel("ingest", "-c", tmp_path / "agentjet.yaml")
    assert (ran.code, ran.out) == (78, "")
    assert f"cannot read {tmp_path}/data/db.sqlite: there is no such file" in ran.err
    assert f"starts at the project root {tmp_path}, the working directory" in ran.err


def test_no_secret_is_shown(flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_JUDGE", KEY)
    raw = {
        "judge": {"api_key_env": "OF_THE_JUDGE", "base_url": "http://me:hidden-one@host/v1", "model": f"m-{KEY}"},
        "serving": {"extra_args": ["--api-key", "hidden-two", "--hf-token=hidden-three", "--seed", "7"]},
    }
    (tmp_path / "flywheel.yaml").write_text(yaml.safe_dump(raw))
    ran = flywheel("config", "show", "--json")
    found = told_settings(ran)
    assert found["judge.api_key_env"][1].endswith("; set")
    assert found["judge.base_url"][0] == "http://[secret]@host/v1"
    assert found["serving.extra_args"][0] == ["--api-key", "[secret]", "--hf-token=[secret]", "--seed", "7"]
    for text in (ran.out, flywheel("config", "show").out):
        assert KEY not in text
        assert "hidden" not in text


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_are_printed(flywheel: Run, name: str) -> None:
    shipped = json.loads((ROOT / SCHEMAS[name]).read_text())
    assert flywheel("config", "schema", *([] if name == "config" else [name])).json == shipped
    assert shipped["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    meta.validate(shipped)


def accepts(name: str, raw: Any) -> bool:
    return Draft202012Validator(schema_of(name)).is_valid(raw)


@pytest.mark.parametrize(
    ("name", "file"),
    [(name, file) for name in ("config", "filters") for file in sorted((ROOT / SCHEMAS[name]).parent.glob("*.yaml"))],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_shipped_file_validates_and_names_its_schema(name: str, file: Path) -> None:
    text = file.read_text()
    assert accepts(name, yaml.safe_load(text))
    if not file.name.startswith("demo"):  # templates, which nobody edits
        assert text.startswith(f"# yaml-language-server: $schema={Path(SCHEMAS[name]).name}\n")


def test_init_lays_the_schemas_beside_the_files(flywheel: Run, tmp_path: Path) -> None:
    assert flywheel("init").code == 0
    files = [
        tmp_path / "flywheel.yaml",
        *(tmp_path / "filters").glob("*.yaml"),
        *(tmp_path / "rubrics").glob("*.yaml"),
    ]
    for file in files:
        named = file.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        assert json.loads((file.parent / named).read_text())["$schema"]


RIGHT: list[dict[str, Any]] = [
    {},
    {"sources": [{"path": "a"}, {"type": "otlp"}, {"type": "calls"}, {"type": "jsonl", "path": "x"}]},
    {"serving": {"call_log": False}},
    {"serving": {"call_log": True}},
    {"serving": {"call_log": {"keep_days": 1}, "tool_call_parser": None}},
    {"retention": {"keep_days": None}},
    {"training": {"lora": {"target_modules": ["q_proj"]}}},
    {"gate": {"non_inferiority_margins": {"a": 0.1}}},
    {"gate": {"suites": {"a": {"file": "a.jsonl", "margin": 0.1}}}},
]


@pytest.mark.parametrize("raw", RIGHT, ids=str)
def test_what_the_program_takes_the_schema_accepts(raw: dict[str, Any], tmp_path: Path) -> None:
    parse(raw, "c.yaml", tmp_path)
    assert accepts("config", raw)


@pytest.mark.slow
def test_wrong_keys_and_values_are_marked() -> None:
    for raw in ({"judge": {"max_threads": 3}}, {"judgement": {}}, {"trigger": {"min_samples": "many"}}, *MISTAKES):
        with pytest.raises(ConfigError):
            parse(raw, "c.yaml", Path())
    # What checks across characters or keys find, a schema cannot say.
    unsaid = [raw for raw in MISTAKES if accepts("config", json.loads(json.dumps(raw)))]
    assert len(unsaid) <= len(MISTAKES) // 3, unsaid
    assert not accepts("config", {"judge": {"max_threads": 3}})
    assert not accepts("config", {"trigger": {"min_samples": "many"}})
    assert not accepts("config", {"sources": [{"type": "csv"}]})
    assert not accepts("config", {"sources": [{"type": "jsonl"}]})


def test_every_setting_is_described() -> None:
    schema = schema_of("config")
    for section in (schema, *schema["$defs"].values()):
        for key, part in section.get("properties", {}).items():
            assert "$ref" in part or "anyOf" in part or part.get("description"), key
            assert "title" not in part


@pytest.mark.parametrize("kind", FILTERS)
def test_parameters_of_a_filter_are_checked_by_its_type(kind: str, tmp_path: Path) -> None:
    right = {"type": kind, **({"params": {"path": "f.py"}} if kind == "python" else {})}
    chain = {"id": "c", "filters": [right]}
    (tmp_path / "f.py").write_text("def keep(task):\n    return True\n")
    (tmp_path / "c.yaml").write_text(json.dumps(chain))
    load_chain(tmp_path / "c.yaml")
    assert accepts("filters", chain)
    wrong = {"type": kind, "params": {**right.get("params", {}), "nothing": 1}}  # type: ignore[dict-item]
    assert not accepts("filters", {"id": "c", "filters": [wrong]})
    assert accepts("filters", {"id": "c", "filters": [{**wrong, "enabled": False}]})
    assert not accepts("filters", {"id": "c", "filters": [{"type": f"{kind}s"}]})


def test_an_agent_that_is_stored_and_becomes_no_task_is_a_warning(flywheel: Run, tmp_path: Path) -> None:
    file = tmp_path / "flywheel.yaml"
    file.write_text("ingest: {agents: {exclude: [A, B]}}\nprivacy: {exclude: {agents: [B]}}\n")
    (warning,) = flywheel("config", "show", "--json").json["warnings"]
    assert "ingest.agents.exclude names A, and privacy.exclude.agents does not" in warning
    assert f"WARNING {warning}" in " ".join(flywheel("config", "show").out.split())
    file.write_text("privacy: {exclude: {agents: [B]}}\n")
    assert flywheel("config", "show", "--json").json["warnings"] == []
