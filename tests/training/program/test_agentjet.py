"""Workflows and judges written as AgentJet's documentation shows them run without `ajet`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config.agentjet import with_defaults
from flywheel.daemon.rounds.round_tasks import program_line
from flywheel.errors import ConfigError
from flywheel.records.program_run import RunResult
from flywheel.records.task import task_line
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.program_pool import ProgramPool
from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.serving.fake_vllm import running
from tests.sources.studio.reading import read_all
from tests.sources.studio.writer import DATA, labels
from tests.training.program.conftest import NewPool

pytestmark = pytest.mark.slow

WORKFLOWS = """
import json
import urllib.request
from types import SimpleNamespace

import numpy
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
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
        elsewhere = SimpleNamespace(model="debug", base_url="http://127.0.0.1:2/v1")
        models = [
            tuner.as_agentscope_model(agent_name="a", target_tag="planner", debug_model=elsewhere),
            tuner.as_agentscope_model(agent_name="b", target_tag="writer", debug_model=elsewhere),
            tuner.as_agentscope_model(agent_name="c", target_tag="other", debug_model=elsewhere),
        ]
        return WorkflowOutput(metadata={"final_answer": " ".join(each.model for each in models)})


class Debugs(Workflow):
    trainable_targets: list[str] | None = ["planner"]

    async def execute(self, workflow_task, tuner):
        metadata = workflow_task.task.metadata
        try:
            said = await self.ask(tuner, metadata["way"], metadata["debug_model"])
        except ValueError:
            if not metadata.get("catches"):
                raise
            said = "Sorry"
        await tuner.as_raw_openai_sdk_client(target_tag="planner").chat.completions.create(messages=MESSAGES)
        return WorkflowOutput(reward=0.0, metadata={"final_answer": said})

    async def ask(self, tuner, way, debug_model):
        if way == "client":
            client = tuner.as_raw_openai_sdk_client(target_tag="writer", debug_model=debug_model)
            reply = await client.chat.completions.create(messages=MESSAGES)
            return reply.choices[0].message.content
        if way == "address":
            return tuner.as_oai_baseurl_apikey(target_tag=debug_model).model
        if way == "object":
            credential = OpenAICredential(api_key="none")
            debug_model = OpenAIChatModel(credential=credential, model=debug_model, stream=False)
        model = tuner.as_agentscope_model(target_tag="writer", debug_model=debug_model)
        reply = await model([UserMsg(name="user", content="Hello")])
        return reply.content[0].text


class Measures(Workflow):
    async def execute(self, workflow_task, tuner):
        found = {"loss": numpy.float32(0.5), "tokens": numpy.int64(7), "one": numpy.array(2.0), "is": True}
        more = {"each": numpy.ones(2), "text": "7"}
        return WorkflowOutput(metadata={"final_answer": "7"}, log_metrics=found | more)


class UsesMore(Workflow):
    async def execute(self, workflow_task, tuner):
        RobustDashScopeChatModel("qwen-max")


class ReadsSettings(Workflow):
    async def execute(self, workflow_task, tuner):
        config = tuner.config
        known = [config.ajet.rollout.multi_turn.max_steps, config["ajet"]["data"]["train_batch_size"]]
        known += [config.astuner.rollout.temperature, config.board.sizes[0].width, config.get("nothing", "no")]
        try:
            config.ajet.rollout.multi_turn.most_steps
        except AttributeError as error:
            known.append(str(error))
        return WorkflowOutput(reward=1, metadata={"final_answer": " ".join(map(str, known))})
"""
OF_ASTUNER = """
from agentscope.message import UserMsg
from agentscope.model import ChatModelBase
from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.cli.job import AstunerJob


class Earlier(Workflow):
    async def agentscope_execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        other = model_tuner.register_model("judge", default_model="debug")
        assert model_tuner.get_model("judge") is other
        assert isinstance(model_tuner, ChatModelBase)
        reply = await model_tuner([UserMsg(name="user", content=task.task.main_query)])
        try:
            model_tuner.get_model("nobody")
        except ValueError as error:
            unknown = str(error)
        said = [reply.content[0].text, model_tuner.model, other.model, unknown]
        return WorkflowOutput(metadata={"final_answer": " | ".join(said)})


class Starts(Workflow):
    async def execute(self, task, model_tuner):
        AstunerJob(None)
"""
JUDGES = """
import re

from ajet.task_judge.base_judge import BaseJudge
from ajet.task_rollout.dashscope_llm_bridge import create_external_llm_fn
from ajet.workflow import WorkflowOutput, WorkflowTask


class Contains(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple:
        found = workflow_task.task.metadata["answer"] in workflow_output.metadata["final_answer"]
        return (1.0 if found else 0.0), found


class SameBox(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        wanted = workflow_task.task.metadata["answer"].split("####")[-1].strip()
        box = re.search(r"\\\\boxed\\{([^}]*)\\}", workflow_output.metadata["final_answer"])
        return float(box is not None and box.group(1) == wanted), box is not None and box.group(1) == wanted


class AsksAnother(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        named = self.config.ajet.task_judge
        ask = create_external_llm_fn(
            alien_llm_model=named.alien_llm_model, alien_llm_response_length=named.alien_llm_response_length
        )
        said = ask([{"role": "user", "content": "Is it right?"}], sampling_params_override={"temperature": 0.5})
        return float(said == {"role": "assistant", "content": "You asked: Is it right?"})
"""
NOWHERE = ModelEndpoint("http://127.0.0.1:9/v1", "my-agent")
TASK = {"task_id": "t-1", "main_query": "What is 12 times 34?", "metadata": {"answer": "12 times 34"}}


def project(folder: Path) -> None:
    (folder / "project").mkdir(exist_ok=True)
    for name, text in (("workflows", WORKFLOWS), ("judges", JUDGES), ("earlier", OF_ASTUNER)):
        (folder / "project" / f"{name}.py").write_text(text)


async def run(
    folder: Path,
    name: str,
    judge: str = "",
    *,
    module: str = "workflows",
    task: dict[str, Any] = TASK,
    answer: str | None = None,
    others: dict[str, ModelEndpoint] | None = None,
    asks: str = "",
    **settings: Any,
) -> tuple[RunResult, list[Any]]:
    """Run a class of the project once. Returns the result and what the model was sent. `asks` is the model of the
    judge's endpoint, which is the same server."""
    project(folder)
    model = Recorder(ScriptedModel())
    with running(model) as url:
        program = AgentProgram(
            workflow=f"project.{module}->{name}",
            reward_function=judge,
            folder=str(folder),
            auxiliary_models=others or {},
            config=with_defaults(settings.pop("config", {})),
            judge=ModelEndpoint(f"{url}/v1", asks, "key-1|key-2") if asks else None,
            **settings,
        )
        pool = ProgramPool(program, workers=1)
        try:
            pool.start()
            models = {"agent": ModelEndpoint(f"{url}/v1", "my-agent")}
            return await pool.run(task, models, "agent", answer=answer), model.requests
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
    result, _ = await run(
        tmp_path, "OfAgents", others={"writer": ModelEndpoint("http://127.0.0.1:1/v1", "writer-model")}
    )
    assert (result.error, result.response) == ("", "my-agent writer-model debug")


def debugging(way: str, debug_model: str | None, **metadata: Any) -> dict[str, Any]:
    return {**TASK, "metadata": {"way": way, "debug_model": debug_model, **metadata}}


@pytest.mark.parametrize(
    ("way", "debug_model"), [("client", "big"), ("name", "gpt-4o"), ("object", "gpt-4o"), ("address", "big")]
)
async def test_an_agent_that_is_not_trained_has_the_auxiliary_model_of_its_debug_model(
    tmp_path: Path, way: str, debug_model: str
) -> None:
    """By the key of that model, or by the name that its endpoint has for it."""
    other = Recorder(ScriptedModel())
    with running(other) as url:
        others = {"big": ModelEndpoint(f"{url}/v1", "gpt-4o", "key-1")}
        result, sent = await run(tmp_path, "Debugs", task=debugging(way, debug_model), others=others)
    assert result.error == ""
    # The policy has only the trained agent's call.
    assert [(each["model"], each["messages"][-1]["content"]) for each in sent] == [
        ("my-agent", "What is 12 times 34?")
    ]
    if way == "address":
        assert result.response == "gpt-4o"
    else:
        assert [each["model"] for each in other.requests] == ["gpt-4o"]


@pytest.mark.parametrize(
    ("way", "debug_model"), [("client", "gpt-4o"), ("name", None), ("object", "gpt-4o"), ("address", "x")]
)
async def test_an_agent_that_only_the_policy_could_answer_is_refused_by_name(
    tmp_path: Path, way: str, debug_model: str | None
) -> None:
    result, sent = await run(tmp_path, "Debugs", task=debugging(way, debug_model))
    assert (result.cause, sent) == ("raised", [])
    tag, named = ("x", "") if way == "address" else ("writer", debug_model or "")
    for part in (
        "project.workflows->Debugs trains planner: its agent with target_tag",
        f"{tag!r} and debug_model {named!r} would be answered by the policy, and trained. Add a model of either name",
        "(workflows.py, line",
    ):
        assert part in result.error


async def test_a_workflow_that_catches_the_refusal_is_refused_as_well(tmp_path: Path) -> None:
    result, sent = await run(tmp_path, "Debugs", task=debugging("client", "gpt-4o", catches=True))
    assert (result.cause, result.reward, len(sent)) == ("raised", None, 1)
    assert "project.workflows->Debugs trains planner: its agent with target_tag 'writer'" in result.error


async def test_numbers_of_numpy_are_metrics(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "Measures")
    assert (result.error, result.metrics) == ("", {"loss": 0.5, "tokens": 7.0, "one": 2.0, "is": 1.0})


async def test_parts_that_only_agentjet_has_are_named(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "UsesMore")
    assert result.cause == "raised"
    assert "RobustDashScopeChatModel of ajet.utils.robust_dashscope is not available" in result.error


async def test_classes_of_astuner_get_a_tuner_that_is_the_chat_model(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "Earlier", module="earlier")
    unknown = "no model is registered as 'nobody': call register_model first"
    assert result.error == ""
    assert result.response == f"You asked: What is 12 times 34? | my-agent | my-agent | {unknown}"


async def test_a_job_is_refused_with_what_to_use(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "Starts", module="earlier")
    assert "AstunerJob of astuner.cli.job is not available: start rounds with `flywheel round" in result.error


async def test_a_checkout_that_cannot_be_imported_is_not_in_the_way(new_pool: NewPool, tmp_path: Path) -> None:
    (tmp_path / "ajet").mkdir()
    (tmp_path / "ajet" / "__init__.py").write_text("import a_package_that_is_not_installed\n")
    project(tmp_path)
    pool = new_pool(workflow="project.workflows->OfTheSdk")
    pool.start()
    [note] = pool.notes
    assert note.startswith(f"{tmp_path}/ajet/__init__.py cannot be imported (No module named 'a_package")


async def test_an_installed_agentjet_needs_its_own_variables(new_pool: NewPool, tmp_path: Path) -> None:
    (tmp_path / "ajet").mkdir()
    (tmp_path / "ajet" / "__init__.py").write_text("class Own:\n    async def execute(self, task, tuner): pass\n")
    pool = new_pool(workflow="ajet->Own", environment={"DASHSCOPE_API_KEY_BACKUP": "sk-1"})
    pool.start()
    [note] = pool.notes
    assert note.endswith("rollout.agent_environment must name DASHSCOPE_API_KEY")


async def test_settings_are_those_of_the_file_over_the_documented_ones(tmp_path: Path) -> None:
    own = {"ajet": {"rollout": {"temperature": 0.5}}, "board": {"sizes": [{"width": 4}]}}
    result, _ = await run(tmp_path, "ReadsSettings", config=own)
    path, why = "config.ajet.rollout.multi_turn.most_steps", "neither in the configuration nor a documented setting"
    assert (result.error, result.response) == ("", f"30 32 0.5 4 no {path} is {why} of AgentJet")


async def test_a_judge_asks_the_judges_endpoint_or_the_auxiliary_model_of_that_name(tmp_path: Path) -> None:
    named = {"ajet": {"task_judge": {"alien_llm_model": "big", "alien_llm_response_length": 99}}}
    result, sent = await run(tmp_path, "OfTheSdk", "project.judges->AsksAnother", asks="small", config=named)
    assert (result.error, result.reward) == ("", 1.0)
    assert {key: value for key, value in sent[-1].items() if key != "messages"} == {
        "model": "big",
        "n": 1,
        "temperature": 0.5,
        "max_completion_tokens": 99,
    }
    others = {"big": ModelEndpoint("http://127.0.0.1:9/v1", "elsewhere")}
    (tmp_path / "second").mkdir()
    result, sent = await run(
        tmp_path / "second", "OfTheSdk", "project.judges->AsksAnother", asks="small", config=named, others=others
    )
    assert "RuntimeError: elsewhere at http://127.0.0.1:9/v1 does not answer" in result.error
    assert [each["model"] for each in sent] == ["my-agent"]


@pytest.mark.parametrize("package", ["ajet", pytest.param("astuner", marks=pytest.mark.extended)])
async def test_the_judge_of_boxed_results_is_our_check(tmp_path: Path, package: str) -> None:
    judge = f"{package}.task_judge.math_answer_as_judge->MathAnswerAsJudge"
    for answer, right, reward in (
        (r"So \boxed{\frac{1}{2}}.", r"so much is 1/2 #### 0.5", 1.0),
        (r"\boxed{1} or \boxed{2}", "1", 0.0),
        ("408", "408", 0.0),
        (r"\boxed{408}", "", 0.0),
    ):
        task = {**TASK, "metadata": {"answer": right}}
        result, sent = await run(tmp_path, "OfTheSdk", judge, task=task, answer=answer, needs_reward=True)
        assert (result.error, result.reward, result.metrics) == ("", reward, {"is_success": reward}), answer
        assert sent == []


async def test_accepted_replies_are_rewarded_when_they_are_repeated(new_pool: NewPool, tmp_path: Path) -> None:
    good = {label["span_id"]: label for label in labels("old") if label["expected_verdict"] == "GOOD"}
    replies, *_ = read_all(DATA / "old.sqlite")
    lines = [task_line(reply, "old") for reply in replies if reply.span_id in good and not reply.skip]
    project(tmp_path)
    pool = new_pool(workflow="project.workflows->OfTheSdk", reward_function="project.judges->SameBox")
    rewards = {}
    for line in lines:
        task = program_line(line, is_accepted=True)
        rewards[line["main_query"]] = await pool.run(task, {"agent": NOWHERE}, "agent", answer=line["answer"])
    assert {result.error for result in rewards.values()} == {""}
    assert [question for question, result in rewards.items() if result.reward != 1.0] == [
        "Write 2/11 as a LaTeX fraction."
    ]
    assert len(rewards) > 50


def test_a_class_that_is_neither(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool("class Other: pass", workflow=f"{tmp_path / 'agent.py'}->Other")
    with pytest.raises(ConfigError, match="neither a workflow nor a judge class of AgentJet"):
        pool.start()
