"""`flywheel.tune` takes the settings of AgentScope's tuner and of Trinity's files, and one round of it trains."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import types
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

import flywheel
from flywheel.config import foreign, trinity
from flywheel.config.file import Config
from flywheel.config.training import AgentProgramSettings
from flywheel.daemon import file_round
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import RoundResult
from flywheel.training.data.round_directory import read_spec
from flywheel.tuner import call, objects
from tests.base_dependencies import DEPENDENCIES, closure, link
from tests.factories.round import POLICY


async def run(task: Any, model: Any) -> float:
    return 1.0


def round_of(config: Any = None, **given: Any) -> call.Round:
    """What a call of `tune` means."""
    return call.round_of({"workflow_func": run, "config": config, **given}, Path("/made"), Path(sys.executable))


def settings(config: Any = None, **given: Any) -> Config:
    return round_of(config, **given).settings


class TunerModelConfig:
    """As AgentScope 1.0.21 has it, with its defaults."""

    def __init__(self, **given: Any) -> None:
        self.values = {
            "model_path": "/models/qwen", "max_model_len": 4096, "temperature": 0.7, "top_p": 1.0, "max_tokens": 8192,
            "enable_thinking": None, "tensor_parallel_size": 1, "inference_engine_num": 2,
            "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1", "tinker_config": None, **given,
        }  # fmt: skip

    def model_dump(self) -> dict[str, Any]:
        return self.values


@pytest.fixture(autouse=True)
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "gpus_of_machine", lambda: 8)


def test_the_objects_of_agentscopes_tuner(caplog: pytest.LogCaptureFixture) -> None:
    algorithm = types.SimpleNamespace(
        algorithm_type="multi_step_grpo", learning_rate=2e-6, group_size=6, batch_size=32, save_interval_steps=100,
        eval_interval_steps=100,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        found = settings(model=TunerModelConfig(), algorithm=algorithm)
    assert (found.model.base, found.rollout.max_model_len, found.rollout.engines) == ("/models/qwen", 4096, 2)
    assert (found.rollout.temperature, found.rollout.max_completion_tokens) == (0.7, None)
    assert (found.training.group_size, found.training.prompts_per_step, found.training.learning_rate) == (6, 32, 2e-6)
    assert (found.serving.tool_call_parser, found.serving.reasoning_parser) == (None, None)
    assert isinstance(found.rollout.agent, AgentProgramSettings)
    assert found.rollout.agent.workflow == f"{Path(__file__)}:run"
    assert found.training.save_steps == 100
    assert "the arguments: without effect: " in caplog.text
    assert ", algorithm.eval_interval_steps; see" in caplog.text


def test_the_data_sets_of_a_trinity_file_and_its_epochs(tmp_path: Path) -> None:
    taskset = {"path": "openai/gsm8k", "subset_name": "main", "split": "train", "format": {"prompt_key": "problem"}}
    inputs = {"taskset": taskset, "eval_tasksets": [{**taskset, "split": "test"}, {"path": "more.jsonl"}]}
    raw = {"buffer": {"total_epochs": 3, "batch_size": 16, "explorer_input": inputs}}
    (tmp_path / "trinity.yaml").write_text(yaml.safe_dump(raw))
    found = round_of(config_path=tmp_path / "trinity.yaml")
    assert found.train == {
        "path": "openai/gsm8k", "name": "main", "split": "train", "prompt_key": "problem", "total_epochs": 3,
    }  # fmt: skip
    assert found.held_out == [
        {"path": "openai/gsm8k", "name": "main", "split": "test", "prompt_key": "problem"},
        {"path": "more.jsonl"},
    ]
    assert found.epochs == 3
    assert round_of({"buffer": {"batch_size": 1}}).epochs == 1
    assert round_of({"training": {"steps": 4}}, config_path=tmp_path / "trinity.yaml").epochs is None


def test_arguments_win_over_the_mapping_and_the_mapping_over_the_file(tmp_path: Path) -> None:
    raw = {
        "model": {"model_path": "/file", "temperature": 0.6, "max_response_tokens": 99, "max_model_len": 1000},
        "buffer": {"batch_size": 2, "total_steps": 7, "explorer_input": {"taskset": {"path": "x", "split": "dev"}}},
        "algorithm": {"repeat_times": 4, "optimizer": {"lr": 3e-6}},
        "explorer": {"max_timeout": 11},
    }
    file = tmp_path / "trinity.yaml"
    file.write_text(yaml.safe_dump(raw))
    alone = round_of(config_path=file)
    assert (alone.settings.training.steps, alone.settings.rollout.temperature, alone.epochs) == (7, 0.6, None)
    model = objects.TunerModelConfig(model_path="/argument", max_model_len=2000, max_tokens=50)
    found = round_of(
        {"group_size": 5, "timeout": 12, "rollout": {"workers": 3, "reward": {"rubric": 1}}},
        config_path=file,
        model=model,
        algorithm=objects.AlgorithmConfig(group_size=6, batch_size=9),
        train_dataset=objects.DatasetConfig(path="y", total_epochs=2),
        eval_dataset="z.jsonl",
    )
    settings = found.settings
    assert (settings.model.base, settings.rollout.max_model_len) == ("/argument", 2000)
    # A default that the tuner hands on wins; that of the temperature, which it does not, gives way to the file.
    assert (settings.rollout.max_completion_tokens, settings.rollout.temperature) == (50, 0.6)
    assert (settings.training.group_size, settings.training.prompts_per_step) == (6, 9)
    assert settings.training.learning_rate == 1e-6
    assert (settings.rollout.agent_timeout_seconds, settings.rollout.workers) == (12, 3)
    assert settings.rollout.reward.rubric == 1
    assert found.train == {"path": "y", "name": None, "split": "train", "total_epochs": 2}
    assert (found.epochs, found.held_out[0]["path"]) == (2, "z.jsonl")
    warm = objects.TunerModelConfig(model_path="/a", max_model_len=2000, temperature=0.9)
    assert round_of(config_path=file, model=warm).settings.rollout.temperature == 0.9
    steps = objects.DatasetConfig(path="y", total_steps=3)
    found = round_of(config_path=file, train_dataset=steps)
    assert (found.settings.training.steps, found.epochs) == (3, None)


def test_an_argument_may_have_a_part_of_what_the_configuration_has(tmp_path: Path) -> None:
    trinity_file = tmp_path / "trinity.yaml"
    taskset = {"path": "/tmp/d.jsonl", "split": "dev"}
    trinity_file.write_text(yaml.safe_dump({"buffer": {"total_steps": 7, "explorer_input": {"taskset": taskset}}}))
    for config in ({"model": {"base": "m"}, "train_dataset": taskset}, trinity_file):
        found = round_of(config, train_dataset={"total_steps": 5})
        assert (found.settings.training.steps, found.train["path"]) == (5, "/tmp/d.jsonl")
        found = round_of(config, train_dataset={}, eval_dataset={})
        assert (found.train["path"], len(found.held_out)) == ("/tmp/d.jsonl", 1)


def test_the_steps_are_epochs_times_tasks_by_batch(tmp_path: Path) -> None:
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    rows.write_text("".join(json.dumps({"seed": n}) + "\n" for n in range(10)))
    held_out.write_text("".join(json.dumps({"question": f"q {n}"}) + "\n" for n in range(8)))
    for batch, epochs, steps, asked in ((4, 1, 3, 4), (4, 3, 8, 4), (32, 2, 2, 10)):
        config = settings({"batch_size": batch})
        spec = file_round.spec_of(config, rows, [held_out], epochs=epochs)
        assert (spec.settings["training"]["steps"], spec.settings["training"]["prompts_per_step"]) == (steps, asked)
        # A line without a question is passed to the workflow.
        assert (len(spec.train), spec.train[0].line["seed"], len(spec.held_out)) == (10, 0, 8)


def test_models_that_would_need_engines_are_refused_with_what_to_use() -> None:
    model = objects.TunerModelConfig(model_path="/judge", max_model_len=10)
    with pytest.raises(ConfigError, match=r"'judge': \{'base_url': URL"):
        settings(auxiliary_models={"judge": model})
    found = settings(auxiliary_models={"judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}})
    assert found.rollout.auxiliary_models["judge"].model == "m"
    with pytest.raises(ConfigError, match="rounds train on this machine"):
        settings(
            model=objects.TunerModelConfig(model_path="/a", max_model_len=9, tinker_config=objects.TinkerConfig())
        )


@pytest.mark.parametrize("name", ["tune_prompt", "select_model", "PromptTuneConfig"])
def test_other_functions_of_the_tuner_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot use {name} of AgentScope's tuner"):
        getattr(flywheel.tuner, name)(workflow_func=run)


def test_the_workflow_stays_in_the_callers_interpreter() -> None:
    for trainer, python in ((Path(sys.executable), None), (Path("/trainer/python"), Path(sys.executable))):
        found = call.round_of({"workflow_func": run}, Path("/made"), trainer).settings.rollout.agent
        assert isinstance(found, AgentProgramSettings)
        assert found.python == python


@pytest.mark.slow
def test_the_packages_are_looked_for_in_the_interpreter_that_trains(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"missing": ["vllm", "ray"]}\'\n')
    python.chmod(0o755)
    with pytest.raises(TrainError, match=rf"vllm, ray are not installed for {python}"):
        flywheel.tune(run, trainer_python=python)


@pytest.mark.slow
def test_the_names_of_the_tuner_need_little(tmp_path: Path) -> None:
    code = (
        "import sys; from flywheel.tuner import tune, DatasetConfig, TunerModelConfig, TinkerConfig, AlgorithmConfig,"
        " WorkflowOutput, JudgeOutput; print([n for n in sys.modules if n.split('.')[0] in ('torch', 'ray', 'vllm',"
        " 'trl', 'numpy') or n.startswith(('flywheel.daemon', 'flywheel.config'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"training": {"stepz": 3}}, "unknown key `training.stepz` (did you mean `steps`?)"),
        ({"repeat_times": "many"}, "`repeat_times`: it must be a whole number, not `many`"),
        ({"training": {"group_size": "many"}}, "`training.group_size`: it must be a whole number, not `many`"),
        ({"algorithm": {"repeat_times": 2}}, "`algorithm.repeat_times`: it must be 4 or more, not `2`"),
        ({"algorithm": {"repeat_times": 2}, "training": {"group_size": 3}}, "`training.group_size`: it must be 4"),
        (
            {"buffer": {"total_steps": 3}, "training": {"warmup_steps": 5}},
            "`training`: warmup_steps 5 is not below steps 3: the learning rate would never be reached (steps is "
            "`buffer.total_steps`)",
        ),
        (
            {"model": {"lora_configs": [{"lora_rank": 512}]}},
            "model.lora_configs.lora_rank 512 is above serving.max_lora_rank",
        ),
        # What no release of Trinity has, and is close to what one has.
        ({"trainer": {"save_intervall": 3}}, "unknown key `trainer.save_intervall` (did you mean `trainer.save_int"),
        (
            {"model": {"max_respons_tokens": 3}},
            "`model.max_respons_tokens` (did you mean `model.max_response_tokens`?",
        ),
        ({"buffer": {}, "sychronizer": {"sync_interval": 1}}, "`sychronizer` (did you mean `synchronizer`?)"),
        (
            {"buffer": {"explorer_input": {"eval_tasksets": [{}, {"path": "x", "format": {"promt_key": "q"}}]}}},
            "`buffer.explorer_input.eval_tasksets[1].format.promt_key` (did you mean "
            "`buffer.explorer_input.eval_tasksets[1].format.prompt_key`?)",
        ),
        (
            {"algorithm": {"algorithm_type": "ppo"}},
            "`algorithm.algorithm_type` is ppo: `flywheel.tune` trains with GRPO",
        ),
        ({"batchsize": 3}, "unknown key `batchsize` (did you mean `batch_size`?)"),
        ({"colour": 3}, "unknown key `colour`"),
    ],
)
def test_a_wrong_setting_is_named(config: Any, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(config)
    assert why in str(error.value)


def test_the_fields_of_a_models_object_are_named() -> None:
    with pytest.raises(ConfigError, match=r"`model.max_model_len`: it must be above 0"):
        settings(model=TunerModelConfig(max_model_len=0))
    with pytest.raises(ConfigError, match=r"`algorithm.group_size`: it must be 4 or more"):
        settings({"repeat_times": 8}, algorithm=objects.AlgorithmConfig(group_size=2))


FIELDS = """
algorithm:
  algorithm_type: grpo
  bypass_old_logprobs: true
  optimizer: {lr: 1e-6, lr_warmup_steps_ratio: 0.1}
  policy_loss_fn_args: {clip_range: 0.2, mu_peak: 0.5}
model: {model_path: /m, trust_remote_code: true, max_cpu_loras: 2}
buffer:
  max_retry_times: 3
  explorer_input:
    taskset:
      path: rows
      task_selector: {selector_type: difficulty_based, feature_keys: [a], kwargs: {tau: 0}}
      workflow_args: {any: thing}
  trainer_input: {experience_buffer: {storage_type: queue, replay_buffer: {enable: true}}}
explorer: {runner_num: 3, bench_on_latest_checkpoint: false, rollout_model: {enforce_eager: true}}
trainer: {enable_preview: true, ppo_max_token_len_per_gpu: 9, trainer_config: {actor_rollout_ref: {actor: {}}}}
synchronizer: {wait_for_checkpoint: false}
monitor: {detailed_stats: true}
data_processor: {task_pipeline: {num_process: 1, operators: [{name: x}], target_fields: [prompt]}}
cluster: {ray_address: auto}
"""


def test_fields_of_trinitys_releases_are_no_mistakes_and_one_line_lists_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = yaml.safe_load(FIELDS)
    raw["explorer"]["entirely_new"] = 1
    (tmp_path / "trinity.yaml").write_text(yaml.safe_dump(raw))
    with caplog.at_level(logging.WARNING):
        found = settings(config_path=tmp_path / "trinity.yaml")
    assert (found.model.base, found.training.learning_rate) == ("/m", 1e-6)
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'trinity.yaml'}: without effect: ")
    assert {"explorer.entirely_new", "buffer.max_retry_times"} <= {*re.findall(r"[\w.]+", line)}


def test_no_key_of_flywheel_is_taken_for_a_mistake_in_one_of_trinity() -> None:
    for name, field in Config.model_fields.items():
        assert not trinity.TRINITY.meant_by(name)
        for key in getattr(field.annotation, "model_fields", {}):
            assert name != "model" or not trinity.TRINITY.knows(f"{name}.{key}")


@pytest.mark.slow
def test_the_contract_is_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_round, "PACKAGES", ("numpy",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.py").write_text("async def run(task):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"load the workflow .*flow.py:run.*has no parameter model"):
        flywheel.tune("flow.py:run", model="/none", train_dataset="rows.jsonl", directory=tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_data_set_that_cannot_be_read_has_the_name_that_the_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_round, "PACKAGES", ("numpy",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.py").write_text("async def run(task, model):\n    return 1.0\n")
    (tmp_path / "trinity.yaml").write_text("buffer: {explorer_input: {taskset: {path: none.jsonl}}}")
    with pytest.raises(ConfigError, match=r"read buffer.explorer_input.taskset none.jsonl"):
        flywheel.tune("flow.py:run", config_path="trinity.yaml")
    with pytest.raises(ConfigError, match=r"read train_dataset other.jsonl"):
        flywheel.tune("flow.py:run", config_path="trinity.yaml", train_dataset="other.jsonl")


@pytest.mark.slow
def test_tune_trains_on_no_task_that_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_round, "PACKAGES", ())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.py").write_text("async def run(task, model):\n    return 1.0\n")
    rows: list[dict[str, Any]] = [{"seed": n, "level": 3} for n in range(6)]
    rows += [{"problem": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(6)]
    asked = [{"level": 3, "seed": 4}, {"seed": 7, "level": 3}, {"problem": " what is 5  plus 5"}]
    for name, lines in (("rows", rows), ("held", asked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    trainer, refused = tmp_path / "trainer", RoundResult(round_id="tune", outcome="refused", reason="no spread")
    work = f"if [ $2 = flywheel.training.worker ]; then echo '{refused.model_dump_json()}' > $3/result.json; exit; fi"
    trainer.write_text(f'#!/bin/sh\n{work}\nexec {sys.executable} "$@"\n')
    trainer.chmod(0o755)
    taskset = {"path": "rows.jsonl", "format": {"prompt_key": "problem"}}
    config = {"gate": {"min_tasks": 2}, "buffer": {"explorer_input": {"taskset": taskset}}}
    held_out = objects.DatasetConfig(path="held.jsonl")
    flywheel.tune("flow.py:run", config, eval_dataset=held_out, directory="made", trainer_python=trainer)
    spec = read_spec(tmp_path / "made")
    assert [task.line.get("seed", task.line["main_query"]) for task in spec.train] == [
        0, 1, 2, 3, 5, *(f"What is {n} plus {n}?" for n in range(5)),
    ]  # fmt: skip
    assert list(spec.left_out.values()) == [
        f"it begins as line {number} of held.jsonl does, which is held out" for number in (1, 3)
    ]


def test_functions_that_no_other_process_can_load() -> None:
    async def inner(task: Any, model: Any) -> float:
        return 1.0

    for function in (inner, lambda task, model: 1.0, len, TunerModelConfig().model_dump):
        with pytest.raises(ConfigError, match="is not a function of a file"):
            call._spec_of(function)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_round, "PACKAGES", ("numpy", "no_such_package"))
    with pytest.raises(TrainError, match=r"no_such_package is not installed for .*pip install .*\[gpu\]"):
        flywheel.tune(run)


def test_a_data_set_that_is_missing_or_too_small_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"What is {n} plus 1?"}) + "\n" for n in range(40)))
    for config, dataset, why in (
        ({"gate": {"min_tasks": 60, "max_tasks": 60}}, rows, "gate.min_tasks"),
        ({}, tmp_path / "none.jsonl", "No such file"),
        ({}, None, "there is no train_dataset"),
    ):
        with pytest.raises(ConfigError, match=why):
            file_round.tasks_of(settings(config), dataset, None)


SCRIPT = """
import json
import os
import sys
import urllib.request

from flywheel.tuner import JudgeOutput, TunerModelConfig, WorkflowOutput, tune


async def run(task, model, auxiliary_models=None):
    at = task["openai"]
    body = json.dumps({"model": at["model"], "messages": [{"role": "user", "content": task["problem"]}]}).encode()
    request = urllib.request.Request(at["base_url"] + "/chat/completions", body)
    with urllib.request.urlopen(request) as reply:
        text = json.load(reply)["choices"][0]["message"]["content"] or ""
    is_callers = float(sys.prefix == os.environ["PREFIX"])
    return WorkflowOutput(response=text, metrics={"is_callers": is_callers, "length": len(text)})


async def judge(task, response, auxiliary_models=None):
    from trinity.common.rewards.math_reward import MathBoxedRewardFn

    found = MathBoxedRewardFn()(response=response, truth=task["solution"])
    return JudgeOutput(reward=(found["accuracy"] + min(1.0, len(response) / 20)) / 2, metrics=found)


if __name__ == "__main__":
    made = tune(
        workflow_func=run, judge_func=judge, config_path="config.yaml", monitor_type="tensorboard", directory="made"
    )
    compared = made.comparison and made.comparison.tasks
    print(json.dumps([str(made.adapter), made.reason, made.steps, compared, made.reward_last]))
"""
TRINITY = """
algorithm: {algorithm_type: multi_step_grpo, repeat_times: 4, optimizer: {lr: 1e-3}}
model: {model_path: "${oc.env:POLICY}", max_model_len: 128, max_response_tokens: 16}
buffer:
  total_epochs: 1
  batch_size: 2
  explorer_input:
    taskset: {path: rows, split: train, format: {prompt_key: problem, response_key: solution}}
    eval_tasksets: [{path: rows, split: test, format: {prompt_key: problem}}]
explorer: {rollout_model: {engine_num: 4}}
synchronizer: {sync_style: dynamic_by_explorer, sync_interval: 1}
serving: {max_model_len: 192}
training: {lora: {r: 8}}
gate: {min_tasks: 2, max_tasks: 2, samples: 2}
"""


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_round_in_another_interpreter_than_the_workflow(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    [site] = (environment / "lib").glob("python*/site-packages")
    link(closure(DEPENDENCIES), site)
    (site / "flywheel.pth").write_text(str(Path(flywheel.__file__).parent.parent))
    (tmp_path / "rows").mkdir()
    for split, numbers in (("train", range(4)), ("test", range(4, 6))):
        lines = (json.dumps({"problem": f"What is {n} plus {n}?", "solution": str(2 * n)}) for n in numbers)
        (tmp_path / "rows" / f"{split}.jsonl").write_text("\n".join(lines))
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(TRINITY)
    trainer = tmp_path / "trainer"
    trainer.write_text(f'#!/bin/sh\nPYTHONPATH="{os.pathsep.join(sys.path)}" exec {sys.executable} "$@"\n')
    trainer.chmod(0o755)
    named = {"FLYWHEEL_TRAINER_PYTHON": str(trainer), "POLICY": str(POLICY), "PREFIX": str(environment)}
    done = subprocess.run(
        [environment / "bin" / "python", "script.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | named,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    log = tmp_path / "made" / "worker.log"
    assert done.returncode == 0, done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    adapter, reason, steps, compared, reward = json.loads(done.stdout.splitlines()[-1])
    assert (Path(adapter), steps, compared) == (tmp_path / "made" / "adapter", 2, 2)
    assert "gain" in reason and 0 <= reward <= 1
    assert list((tmp_path / "made" / "tensorboard").rglob("*tfevents*"))
    assert (Path(adapter) / "adapter_model.safetensors").is_file()
    assert "without effect: synchronizer.sync_style, synchronizer.sync_interval; see" in done.stderr
    measured = [json.loads(line) for line in (Path(adapter).parent / "metrics.jsonl").read_text().splitlines()]
    metrics = [line["program"]["metrics"] for line in measured if line["event"] == "step"]
    assert all(line["is_callers"] == 1 and line["length"] > 0 and 0 <= line["accuracy"] <= 1 for line in metrics)
