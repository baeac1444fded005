"""Workflows and judges written as AgentJet's documentation shows them run without `ajet`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import ConfigError
from flywheel.records.program_run import RunResult
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.program_pool import ProgramPool
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.serving.fake_vllm import running

WORKFLOWS = """
import json
import urllib.request

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.utils.robust_dashscope import RobustDashScopeChatModel
from pydantic import Field

MESSAGES = [{"role": "user", "content": "What is 12 times 34?"}]


class OfTheSdk(Workflow):
    name: str = "calculator"
    system_prompt: str = "Be brief."

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        self.query = workflow_task.task.main_query
        messages = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": self.query}]
        reply = await client.chat.completions.create(messages=messages)
        return WorkflowOutput(reward=None, metadata={"final_answer": reply.choices[0].message.content})


class OverHttp(Workflow):
    async def execute(self, workflow_task, tuner):
        at = tuner.as_oai_baseurl_apikey()
        body = json.dumps({"model": "whatever", "messages": MESSAGES}).encode()
        headers = {"Authorization": f"Bearer {at.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{at.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
        return WorkflowOutput(
            reward=[1.0, 0.5], is_success=True, log_metrics={"length": len(text)}, metadata={"said": text}
        )


class OfAgents(Workflow):
    trainable_targets: list[str] | None = Field(default=["planner"], description="those that are trained")

    async def execute(self, workflow_task, tuner):
        models = [
            tuner.as_agentscope_model(agent_name="a", target_tag="planner", debug_model="debug"),
            tuner.as_agentscope_model(agent_name="b", target_tag="writer", debug_model="debug"),
            tuner.as_agentscope_model(agent_name="c", target_tag="other", debug_model="debug"),
        ]
        names = [each if isinstance(each, str) else each.model for each in models]
        return WorkflowOutput(metadata={"final_answer": " ".join(names)})


class UsesMore(Workflow):
    async def execute(self, workflow_task, tuner):
        RobustDashScopeChatModel("qwen-max")
"""
JUDGES = """
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_rollout.dashscope_llm_bridge import create_external_llm_fn
from ajet.workflow import WorkflowOutput, WorkflowTask


class Contains(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple:
        found = workflow_task.task.metadata["answer"] in workflow_output.metadata["final_answer"]
        return (1.0 if found else 0.0), found
"""
TASK = {"task_id": "t-1", "main_query": "What is 12 times 34?", "metadata": {"answer": "12 times 34"}}


async def run(folder: Path, name: str, judge: str = "", **others: ModelEndpoint) -> tuple[RunResult, list[Any]]:
    """Run a class of `workflows.py` once. Returns the result and what the model was sent."""
    (folder / "project").mkdir()
    (folder / "project" / "workflows.py").write_text(WORKFLOWS)
    (folder / "project" / "judges.py").write_text(JUDGES)
    program = AgentProgram(
        workflow=f"project.workflows->{name}", reward_function=judge, folder=str(folder), auxiliary_models=others
    )
    pool, model = ProgramPool(program, workers=1), Recorder(ScriptedModel())
    with running(model) as url:
        try:
            pool.start()
            return await pool.run(TASK, {"agent": ModelEndpoint(f"{url}/v1", "my-agent")}, "agent"), model.requests
        finally:
            pool.close()


async def test_the_openai_sdk_and_a_judge(tmp_path: Path) -> None:
    result, sent = await run(tmp_path, "OfTheSdk", "project.judges->Contains")
    assert (result.error, result.reward, result.response) == ("", 1.0, "You asked: What is 12 times 34?")
    assert result.metrics == {"is_success": 1.0}
    assert [(each["model"], len(each["messages"])) for each in sent] == [("my-agent", 2)]


async def test_a_workflow_that_rewards_itself_needs_no_judge(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "OverHttp", "project.judges->Contains")
    assert (result.error, result.reward) == ("", 0.75)
    assert result.metrics == {"is_success": 1.0, "length": 31.0}
    assert result.response == '{"said": "You asked: What is 12 times 34?"}'


async def test_an_agent_of_another_target_has_its_own_model(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "OfAgents", writer=ModelEndpoint("http://127.0.0.1:1/v1", "writer-model"))
    assert (result.error, result.response) == ("", "my-agent writer-model debug")


async def test_parts_that_only_agentjet_has_are_named(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "UsesMore")
    assert result.cause == "raised"
    assert "RobustDashScopeChatModel of ajet.utils.robust_dashscope is not available" in result.error


async def test_a_class_that_is_neither(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("class Other: pass\n")
    pool = ProgramPool(AgentProgram(workflow=f"{tmp_path / 'agent.py'}->Other"), workers=1)
    try:
        with pytest.raises(ConfigError, match="neither a workflow nor a judge class of AgentJet"):
            pool.start()
    finally:
        pool.close()
