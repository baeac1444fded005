"""Keys of AgentScope's tuner and of Trinity's files: what each becomes, what is said of it, and interpolations."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config import agentjet
from flywheel.config.file import Config, load
from flywheel.config.interpolation import values_of
from flywheel.config.trinity import ALGORITHM, ARGUMENTS, DATASET, MODEL, TASKSET, TRINITY, from_tuner
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import chain_of
from flywheel.system.yaml_file import YamlDocument
from flywheel.tuner import objects, tune
from scripts.reference_pages import default_of

HERE = Path(__file__).parent
OF_TUNE = ("train_dataset", "eval_dataset", "monitor_type", "config_path")
"""What a key may be used as besides a setting: an argument of `tune`."""
CLASSES = {"TunerModelConfig": MODEL, "AlgorithmConfig": ALGORITHM, "DatasetConfig": DATASET}


def names(file: str) -> list[str]:
    return [line for line in (HERE / file).read_text().splitlines() if not line.startswith("#")]


def translated(raw: dict[str, Any]) -> dict[str, Any]:
    return from_tuner(raw, Config.model_fields.keys(), "x.yaml")


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def test_tune_has_the_tuners_parameters_and_the_classes_have_its_fields_and_defaults() -> None:
    parameters = inspect.signature(tune).parameters
    for line in names("tuner_names.txt"):
        path, is_required, default = line.partition(" ")
        where, _, name = path.partition(".")
        if where == "tune":
            assert parameters[name].default is (inspect.Parameter.empty if is_required else None), name
            assert name in ARGUMENTS
            continue
        field = getattr(objects, where).model_fields[name]
        assert field.is_required() == (default == "required"), path
        assert field.is_required() or field.default == json.loads(default.removeprefix("= ")), path
        assert where not in CLASSES or name in CLASSES[where], path
    there = {line.split()[0] for line in names("tuner_names.txt")}
    for kind, table in CLASSES.items():
        assert {f"{kind}.{name}" for name in table} <= there


def test_every_documented_key_of_trinity_has_a_row() -> None:
    assert set(names("trinity_keys.txt")) - TRINITY.keys() == set()


@pytest.mark.parametrize("table", [*CLASSES.values(), ARGUMENTS, TRINITY])
def test_every_row_is_used_as_a_key_that_exists_or_has_a_reason(table: dict[str, Any]) -> None:
    for path, option in table.items():
        if option.use and option.use.partition(".")[0] not in OF_TUNE:
            default_of(option.use)
        assert option.use or option.why, path
        assert not (option.use and option.only), path


@pytest.mark.parametrize("path", [path for path, option in TRINITY.items() if option.use])
def test_a_used_key_arrives(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agentjet, "gpus_of_machine", lambda: 8)
    option = TRINITY[path]
    value: Any = [{"path": "x"}] if option.use == "eval_dataset" else 3
    raw = nested("model.lora_configs", [{path.rpartition(".")[2]: 3}]) if "lora" in path else nested(path, value)
    assert translated(raw) == nested(option.use, value)


@pytest.mark.parametrize("path", [path for path, option in TRINITY.items() if option.only])
def test_a_value_that_is_not_possible_is_refused_with_the_reason(path: str) -> None:
    option = TRINITY[path]
    assert translated(nested(path, option.only[0])) == {}
    with pytest.raises(ConfigError) as refused:
        translated(nested(path, "another"))
    assert f"`{path}` is another: {option.why}" in str(refused.value)


def test_each_key_without_effect_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    raw = {
        "synchronizer": {"sync_interval": 4, "sync_style": "fixed"},
        "explorer": {"rollout_model": {"dtype": "bfloat16"}, "colour": 1},
        "monitor": {"monitor_args": {"api_key": "k"}},
        "model": {"base": "/own", "rope_theta": None},
    }
    with caplog.at_level(logging.WARNING):
        assert translated(raw) == {"model": {"base": "/own"}}
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "synchronizer.sync_interval: without effect: engines get the weights after each step",
        "synchronizer.sync_style: without effect: engines get the weights after each step",
        "explorer.rollout_model.dtype: without effect: other options of an engine are Flywheel's own",
        "explorer.colour: without effect: no release of Trinity has it",
        "monitor.monitor_args.api_key: without effect: nothing is sent to a service",
    ]


def test_of_several_temperatures_the_nearest_to_the_tasks_wins(caplog: pytest.LogCaptureFixture) -> None:
    taskset = nested(f"{TASKSET}.rollout_args.temperature", 0.8)
    engine = {"explorer": {"rollout_model": {"temperature": 0.7}}}
    model = {"model": {"temperature": 0.6}}
    for raw, wanted in ((model, 0.6), (engine | model, 0.7), (taskset | engine | model, 0.8)):
        assert translated(raw) == {"rollout": {"temperature": wanted}}
    assert f"model.temperature: without effect: {TASKSET}.rollout_args.temperature has another value" in caplog.text


def test_engines_of_a_foreign_file_fit_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {"explorer": {"rollout_model": {"engine_num": 4}}}
    for gpus, engines in ((0, 1), (1, 1), (3, 2), (8, 4)):
        monkeypatch.setattr(agentjet, "gpus_of_machine", lambda gpus=gpus: gpus)
        assert translated(raw)["rollout"].get("engines", 1) == engines
    asked = "explorer.rollout_model.engine_num 4 and tensor_parallel_size 1; this machine has 3 GPUs, and"
    assert asked in caplog.text


FILE = """\
project: mine
checkpoint_root_dir: ${oc.env:NO_SUCH_VARIABLE,./checkpoints}
model:
  model_path: ${oc.env:A_MODEL}
  critic_model_path: ${model.model_path}
  custom_chat_template: "a ${literal} ???"
buffer:
  batch_size: 16
  train_batch_size: ${buffer.batch_size}
  made: 2026-01-01
  explorer_input:
    taskset: {path: p, system_prompt: "${literal}"}
    eval_tasksets: ["${buffer.explorer_input.taskset}"]
"""


def test_interpolations_are_resolved_but_not_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_MODEL", "/models/one")
    document = YamlDocument(FILE)
    found = values_of(document, "read it")
    assert found["checkpoint_root_dir"] == "./checkpoints"
    assert found["model"]["model_path"] == found["model"]["critic_model_path"] == "/models/one"
    assert found["model"]["custom_chat_template"] == "a ${literal} ???"
    assert found["buffer"]["train_batch_size"] == 16
    taskset = {"path": "p", "system_prompt": "${literal}"}
    assert found["buffer"]["explorer_input"] == {"taskset": taskset, "eval_tasksets": [taskset]}
    assert found["buffer"]["made"] == document.value["buffer"]["made"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${oc.env:NO_SUCH_VARIABLE}", "Environment variable 'NO_SUCH_VARIABLE' not found"),
        ("${model.none}", "Interpolation key 'model.none' not found"),
        ("${broken", "it cannot be resolved"),
        ("???", "it is ???, which is no value"),
    ],
)
@pytest.mark.parametrize("root", ["buffer", "ajet"])
def test_what_cannot_be_resolved_is_an_error_with_key_and_line(root: str, value: str, why: str) -> None:
    document = YamlDocument(f'{root}:\n  one: 1\n  two:\n    - three: "{value}"\n')
    with pytest.raises(ConfigError, match=rf"line 4: `{root}\.two\.0\.three`") as refused:
        values_of(document, "read it")
    assert why in str(refused.value)


def test_a_configuration_of_agentjet_is_resolved_and_its_rubrics_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_MODEL", "/models/one")
    rubrics = "reject: the answer has ${placeholders} left"
    chain = [{"type": "llm_evaluate", "enabled": True, "params": {"custom_rubrics": rubrics}}]
    tracing = {"base_url": "./traces.sqlite", "train_output_path": "${ajet.name}.jsonl", "filters": chain}
    raw = {"name": "x", "model": {"path": "${oc.env:A_MODEL}"}, "task_reader": {"feedback_tracing": tracing}}
    (tmp_path / "ajet.yaml").write_text(yaml.safe_dump({"ajet": raw}))
    config = load(tmp_path / "ajet.yaml")
    assert config.model.base == "/models/one"
    assert config.ingest.output is not None
    assert config.ingest.output.name == "x.jsonl"
    found = chain_of(config)
    assert found is not None
    assert found.judge is not None
    assert found.judge.custom_rubrics == rubrics


def test_a_file_of_flywheels_own_is_left_as_it_is() -> None:
    document = YamlDocument("rollout: {setup: '${x}'}\nmodel: {base: '???'}\n")
    assert values_of(document, "read it") is document.value
