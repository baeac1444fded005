"""`flywheel.tune` takes the settings of AgentScope's tuner and of Trinity's files, and one round of it trains."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import flywheel
from flywheel.config import AgentProgramSettings, Config
from flywheel.daemon import file_round
from flywheel.errors import ConfigError, TrainError
from flywheel.tuner import call
from tests.training.data.test_round_directory import POLICY


async def run(task: Any, model: Any) -> float:
    return 1.0


def round_of(config: Any = None, **given: Any) -> call.Round:
    """What a call of `tune` means."""
    return call.round_of(call.Call(run, config=config, **given), Path("/made"), Path(sys.executable))


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
    assert "save_interval_steps: without effect: a round writes its adapter" in caplog.text


def test_a_file_of_trinity(tmp_path: Path) -> None:
    raw = {
        "project": "AgentScope",
        "algorithm": {"algorithm_type": "multi_step_grpo", "repeat_times": 4, "optimizer": {"lr": 1e-6}},
        "model": {"model_path": "/models/qwen", "max_model_len": 2048, "max_response_tokens": 512},
        "buffer": {"batch_size": 16, "total_steps": 12, "explorer_input": {"taskset": {"path": "x"}}},
        "explorer": {"rollout_model": {"engine_num": 3, "temperature": 0.9}, "max_timeout": 300},
        "synchronizer": {"sync_interval": 1},
        "trainer": {"save_interval": 50},
    }
    (tmp_path / "trinity.yaml").write_text(yaml.safe_dump(raw))
    found = settings(tmp_path / "trinity.yaml")
    assert (found.training.group_size, found.training.prompts_per_step, found.training.steps) == (4, 16, 12)
    assert (found.rollout.engines, found.rollout.temperature, found.rollout.agent_timeout_seconds) == (3, 0.9, 300)
    assert (found.rollout.max_model_len, found.rollout.max_completion_tokens) == (2048, 512)


def test_own_keys_and_short_names_together() -> None:
    found = settings(
        {"repeat_times": 5, "timeout": 30, "model": {"base": "/m"}, "rollout": {"workers": 2}}, model="/x"
    )
    assert (found.training.group_size, found.rollout.agent_timeout_seconds, found.rollout.workers) == (5, 30, 2)
    assert found.model.base == "/x"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"training": {"stepz": 3}}, "unknown key `training.stepz` (did you mean `steps`?)"),
        ({"repeat_times": "many"}, "`training.group_size`: it must be a whole number, not `many`"),
        (
            {"algorithm": {"algorithm_type": "ppo"}},
            "`algorithm.algorithm_type` is ppo: `flywheel.tune` trains with GRPO",
        ),
        ({"batchsize": 3}, "unknown key `batchsize`"),
    ],
)
def test_a_wrong_setting_is_named(config: Any, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(config)
    assert why in str(error.value)


def test_functions_that_no_other_process_can_load() -> None:
    async def inner(task: Any, model: Any) -> float:
        return 1.0

    for function in (inner, lambda task, model: 1.0, len, TunerModelConfig().model_dump):
        with pytest.raises(ConfigError, match="is not a function of a file"):
            call._spec_of(function)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_round, "PACKAGES", ("numpy", "no_such_package"))
    with pytest.raises(
        TrainError, match=r"no_such_package is not installed for .*pip install 'agentscope-flywheel\[gpu\]'"
    ):
        flywheel.tune(run)


def test_a_data_set_is_split_by_conversation(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"What is {n} plus 1?",
            "answer": str(n + 1),
            "colour": n,
            "metadata": {"conversation_id": n // 2},
        }
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held_out = file_round.tasks_of(settings({"gate": {"min_tasks": 8}}), tmp_path / "rows.jsonl", None)
    assert (len(train) + len(held_out), len(held_out) >= 8) == (40, True)
    assert not {task.conversation for task in train} & {task.conversation for task in held_out}
    assert train[0].line["colour"] in range(40)
    assert train[0].exchange.line["metadata"]["reference"] == str(train[0].line["colour"] + 1)
    for config, dataset, why in (
        ({"gate": {"min_tasks": 60, "max_tasks": 60}}, tmp_path / "rows.jsonl", "gate.min_tasks"),
        ({}, tmp_path / "none.jsonl", "No such file"),
        ({}, None, "there is no train_dataset"),
    ):
        with pytest.raises(ConfigError, match=why):
            file_round.tasks_of(settings(config), dataset, None)


SCRIPT = """
import json
import urllib.request

import flywheel


async def run(task, model, auxiliary_models=None, logger=None):
    at = task["openai"]
    body = json.dumps({"model": at["model"], "messages": [{"role": "user", "content": task["question"]}]}).encode()
    request = urllib.request.Request(at["base_url"] + "/chat/completions", body)
    with urllib.request.urlopen(request) as reply:
        text = json.load(reply)["choices"][0]["message"]["content"] or ""
    return {"response": text, "metrics": {"length": len(text)}}


async def judge(task, response, auxiliary_models=None, logger=None):
    return min(1.0, len(response) / 20)


if __name__ == "__main__":
    made = flywheel.tune(
        run,
        {
            "repeat_times": 4, "batch_size": 2, "total_steps": 2, "learning_rate": 1e-3,
            "training": {"lora": {"r": 8}},
            "rollout": {"max_model_len": 128, "max_completion_tokens": 16, "workers": 2},
            "serving": {"max_model_len": 192}, "gate": {"min_tasks": 2, "max_tasks": 2, "samples": 2},
        },
        train_dataset="rows.jsonl",
        judge_func=judge,
        monitor_type="tensorboard",
        model=%r,
        directory="made",
    )
    print(json.dumps([str(made.adapter), made.is_better, made.reason, made.steps, made.reward_last]))
"""


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_round_without_a_daemon(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "script.py").write_text(SCRIPT % str(POLICY))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False
    )
    log = tmp_path / "made" / "worker.log"
    assert done.returncode == 0, done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    adapter, _, reason, steps, reward = json.loads(done.stdout.splitlines()[-1])
    assert (Path(adapter), steps) == (tmp_path / "made" / "adapter", 2)
    assert (Path(adapter) / "adapter_model.safetensors").is_file()
    assert list((tmp_path / "made" / "tensorboard").rglob("*tfevents*"))
    assert "gain" in reason and 0 <= reward <= 1
    measured = [json.loads(line) for line in (tmp_path / "made" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["program"]["metrics"]["length"] > 0 for line in measured if line["event"] == "step")
