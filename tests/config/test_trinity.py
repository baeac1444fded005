"""Keys of AgentScope's tuner and of Trinity's files: what each becomes, what is said of it, and interpolations."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config import foreign
from flywheel.config.file import load
from flywheel.config.interpolation import values_of
from flywheel.config.section import merged
from flywheel.config.trinity import DATASET, EVAL_TASKSETS, TASKSET, TRINITY, rows_of, settings_of
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import chain_of
from flywheel.system.yaml_file import YamlDocument
from flywheel.tuner import objects, tune

HERE = Path(__file__).parent
PAIRS = [
    (short, long)
    for short, use in TRINITY.uses.items()
    for long, other in TRINITY.uses.items()
    if use == other and "." not in short and "." in long
]
"""Names for one setting: one without a section, and one of Trinity's files."""


def translated(raw: dict[str, Any]) -> dict[str, Any]:
    rows, own = rows_of(raw)
    return merged(settings_of(rows, "x.yaml"), own)


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def test_tune_has_the_tuners_parameters_and_the_classes_have_its_fields_and_defaults() -> None:
    parameters = inspect.signature(tune).parameters
    for line in (HERE / "tuner_names.txt").read_text().splitlines()[1:]:
        path, is_required, default = line.partition(" ")
        where, _, name = path.partition(".")
        if where == "tune":
            assert parameters[name].default is (inspect.Parameter.empty if is_required else None), name
            continue
        field = getattr(objects, where).model_fields[name]
        assert field.is_required() == (default == "required"), path
        assert field.is_required() or field.default == json.loads(default.removeprefix("= ")), path
        if where in ("TunerModelConfig", "AlgorithmConfig", "DatasetConfig"):
            assert (DATASET[name] if where == "DatasetConfig" else name) in TRINITY.names, path


@pytest.mark.parametrize("path", TRINITY.uses)
def test_a_used_key_arrives(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "gpus_of_machine", lambda: 8)
    value: Any = [{"path": "x"}] if path == EVAL_TASKSETS else 3
    raw = nested("model.lora_configs", [{path.rpartition(".")[2]: 3}]) if "lora" in path else nested(path, value)
    assert translated(raw) == nested(TRINITY.uses[path], value)


ONLY = {name: entry for name, entry in TRINITY.entries.items() if isinstance(entry, foreign.Only)}


@pytest.mark.parametrize("path", ONLY)
def test_a_value_that_is_not_possible_is_refused_with_the_reason(path: str) -> None:
    possible, why, _ = ONLY[path]
    assert translated(nested(path, possible[0] if possible else None)) == {}
    with pytest.raises(ConfigError) as refused:
        translated(nested(path, "another"))
    assert f"`{path}` is another: {why}" in str(refused.value)


def test_of_several_temperatures_the_nearest_to_the_tasks_wins(caplog: pytest.LogCaptureFixture) -> None:
    taskset = nested(f"{TASKSET}.rollout_args.temperature", 0.8)
    engine = {"explorer": {"rollout_model": {"temperature": 0.7}}}
    model = {"model": {"temperature": 0.6}}
    for raw, wanted in ((model, 0.6), (engine | model, 0.7), (taskset | engine | model, 0.8)):
        assert translated(raw) == {"rollout": {"temperature": wanted}}
    note = f"({TASKSET}.rollout_args.temperature has another value)"
    assert f"without effect: model.temperature {note}, explorer.rollout_model.temperature {note}; see" in caplog.text


@pytest.mark.parametrize(("short", "long"), PAIRS)
def test_a_name_without_a_section_wins_over_trinitys(
    short: str, long: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign, "gpus_of_machine", lambda: 8)
    for raw in ({short: 2, **nested(long, 3)}, {**nested(long, 3), short: 2}):
        assert translated(raw) == nested(TRINITY.uses[short], 2)
    line = f"x.yaml: without effect: {long} ({short} has another value); see `flywheel docs migrate`"
    assert caplog.messages == [line, line]


def test_engines_of_a_foreign_file_fit_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign, "gpus_of_machine", lambda: 3)
    assert translated({"explorer": {"rollout_model": {"engine_num": 4}}}) == {"rollout": {"engines": 2}}
    assert (
        "x.yaml: explorer.rollout_model.engine_num: this machine has 3 GPUs, and rounds use 2 × 1 inst" in caplog.text
    )


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
