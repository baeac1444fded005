"""The program that the settings describe, and what an environment variable that is missing does."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config, parse
from flywheel.errors import ConfigError
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.program_pool import program_of
from tests.cases import for_each

AGENT = {"workflow": "agents/helper.py:run", "python": "env/bin/python", "isolation": "run"}


def config(tmp_path: Path, **rollout: Any) -> Config:
    return parse({"rollout": {"agent": AGENT, **rollout}}, "flywheel.yaml", tmp_path)


def test_settings_become_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_MODEL_KEY", "sk-1")
    monkeypatch.setenv("SEARCH_API_KEY", "sk-2")
    program = program_of(
        config(
            tmp_path,
            agent_timeout_seconds=30,
            agent_memory_gb=2.5,
            agent_environment=["SEARCH_API_KEY"],
            setup="agents/helper.py:prepare",
            reward_function="agents.rewards:judge",
            reward={"rubric": 1, "workflow": 0.5},
            auxiliary_models={"user": {"base_url": "http://h/v1", "model": "m", "api_key_env": "USER_MODEL_KEY"}},
            models={"m": "auxiliary", "gpt-4o": "refuse"},
        )
    )
    assert program == AgentProgram(
        workflow=f"{tmp_path}/agents/helper.py:run",
        python=f"{tmp_path}/env/bin/python",
        reward_function="agents.rewards:judge",
        setup=f"{tmp_path}/agents/helper.py:prepare",
        folder=str(tmp_path),
        isolation="run",
        seconds=30.0,
        memory_bytes=2_500_000_000,
        auxiliary_models={"user": ModelEndpoint("http://h/v1", "m", "sk-1")},
        models={"Qwen/Qwen3-4B": "policy", "my-agent": "policy", "m": "auxiliary", "gpt-4o": "refuse"},
        environment={"SEARCH_API_KEY": "sk-2"},
        needs_response=True,
        needs_reward=True,
    )
    assert "sk-1" not in repr(program)
    assert "sk-2" not in repr(program)


def test_who_answers_a_name_is_the_setting_or_follows_from_the_name(tmp_path: Path) -> None:
    others = {"user": {"base_url": "http://h/v1", "model": "gpt-4o-mini"}}
    program = program_of(config(tmp_path, auxiliary_models=others))
    assert program is not None
    names = ("my-agent", "Qwen/Qwen3-4B", "user", "gpt-4o-mini", "gpt-9")
    assert [program.answered_by(name) for name in names] == ["policy", "policy", "auxiliary", "auxiliary", None]
    decided = program_of(config(tmp_path, auxiliary_models=others, models={"user": "policy", "gpt-9": "refuse"}))
    assert decided is not None
    assert [decided.answered_by(name) for name in names] == ["policy", "policy", "policy", "auxiliary", "refuse"]


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ({"gpt-9": "auxiliary"}, "gpt-9: auxiliary_models has no model of that name"),
        ({"my-agent": "refuse"}, "my-agent is an alias, which its own model answers: remove it there"),
        ({"gpt-9": "trained"}, "models.gpt-9"),
    ],
)
def test_a_setting_that_nothing_could_follow_is_refused(tmp_path: Path, models: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config(tmp_path, models=models)


def test_names_of_models_are_for_the_users_agent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="models is for your own agent"):
        parse({"rollout": {"agent": "recorded", "models": {"gpt-9": "refuse"}}}, "flywheel.yaml", tmp_path)


def test_classes_of_agentjet_get_its_settings_and_the_judges_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-3|sk-4")
    raw = {
        "judge": {"base_url": "http://judge/v1", "model": "big", "api_key_env": "JUDGE_KEY"},
        "rollout": {
            "agent": {"workflow": "a.b->Flow", "config": {"ajet": {"day": date(2026, 11, 25), "api_key": "hidden"}}},
            "auxiliary_models": {},
        },
    }
    program = program_of(parse(raw, "flywheel.yaml", tmp_path))
    assert program is not None
    assert program.judge == ModelEndpoint("http://judge/v1", "big", "sk-3|sk-4")
    assert "sk-3" not in repr(program)
    ajet = program.config["ajet"]
    assert (ajet["day"], ajet["api_key"], ajet["rollout"]["num_repeat"]) == ("2026-11-25", None, 4)
    raw["rollout"]["agent"] = AGENT
    plain = program_of(parse(raw, "flywheel.yaml", tmp_path))
    assert plain is not None
    assert (plain.judge, plain.config) == (None, {})


def test_the_files_of_a_program_are_known_in_each_form_of_its_functions() -> None:
    program = AgentProgram(
        workflow="/agents/flow.py->Flow",
        reward_function="agents.rewards:judge",
        setup="/with:colon/setup.py:prepare",
        folder="/agents",
    )
    assert program.files == ["/agents", "/agents/flow.py", "/with:colon/setup.py"]
    assert AgentProgram(command=("node", "agent.mjs"), python="/env/python").files == ["/env/python"]


def test_a_program_runs_from_a_copy_of_its_folder() -> None:
    """What is not in the folder, or is a module, stays."""
    program = AgentProgram(
        workflow="/home/agents/inner/desk.py:run",
        reward_function="my_rewards.desk:reward",
        setup="/other/setup.py->Setup",
        folder="/home/agents",
        python="/usr/bin/python3",
    )
    moved = program.moved("/home/agents", "/tmp/copy")
    assert moved.workflow == "/tmp/copy/inner/desk.py:run"
    assert (moved.reward_function, moved.setup) == (program.reward_function, program.setup)
    assert (moved.folder, moved.python) == ("/tmp/copy", "/usr/bin/python3")
    assert moved.moved("", "/elsewhere") == moved
    assert program.moved("/home/agents/inner", "/tmp/copy").folder == "/home/agents"


def test_a_folder_to_send_needs_a_cluster_to_send_it_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set address, or remove it"):
        parse({"ray": {"working_dir": "agents"}}, "flywheel.yaml", tmp_path)
    sent = parse({"ray": {"address": "10.0.0.1:6379", "working_dir": "agents"}}, "flywheel.yaml", tmp_path)
    assert sent.ray.working_dir == tmp_path / "agents"


def test_rollouts_without_the_users_agent_have_no_program(tmp_path: Path) -> None:
    assert program_of(parse({"rollout": {"agent": "recorded"}}, "flywheel.yaml", tmp_path)) is None


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_API_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=r"the environment variable NOT_SET_API_KEY is not set\. Set it, or take it"
    ):
        program_of(config(tmp_path, agent_environment=["NOT_SET_API_KEY"]))
    model = {"base_url": "http://h/v1", "model": "m", "api_key_env": "NOT_SET_API_KEY"}
    with pytest.raises(ConfigError, match=r"use rollout\.auxiliary_models\.user: the environment variable NOT_SET"):
        program_of(config(tmp_path, auxiliary_models={"user": model}))
    monkeypatch.setenv("NOT_SET_API_KEY", "schlüssel")
    with pytest.raises(ConfigError, match="NOT_SET_API_KEY is empty or contains characters that no key has"):
        program_of(config(tmp_path, auxiliary_models={"user": model}))


@for_each(
    "name, why",
    [("not a name", "must be the name of an environment variable"), ("OPENAI_API_KEY", "each rollout sets it")],
)
def test_variables_that_are_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        config(tmp_path, agent_environment=[name])
    assert "rollout.agent_environment.0" in str(caught.value)
