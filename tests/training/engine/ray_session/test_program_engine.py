"""Rollouts of a user's agent on a real engine: its function or command runs in processes of the engine's pool, and
what is trained on are the tokens of its calls.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, questions
from flywheel.config.file import Config
from flywheel.records.round import RoundTask
from flywheel.training.data import rollout_file
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import EngineSettings
from flywheel.training.engine.rollout_engine import ProgramSetup
from tests.factories.engine import strange_adapter
from tests.factories.task import round_task
from tests.factories.worker import lines
from tests.training.engine.ray_session.round_on_engine import run_round

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ALIAS = "my-agent"
WORKFLOW = """
import json, urllib.request


def ask(messages, model):
    body = json.dumps({"model": model["model"], "messages": messages, "max_tokens": 12}).encode()
    url, headers = model["base_url"] + "/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]


async def run(task, model, logger=None):
    does = task["metadata"].get("does", "")
    messages = list(task["prompt"])
    said = ask(messages, task["openai"])
    if does == "ask others":
        others = [ask(list(task["prompt"]), task["models"][name]) for name in ("writer", "critic")]
        return {"response": json.dumps([said, *others])}
    while does == "loop":
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again"}]
        said = ask(messages, task["openai"])
    if does != "one turn":
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": said}]},
            {"role": "user", "content": [{"type": "text", "text": "What is 1 plus 1?"}]},
        ]
        said = ask(messages, task["openai"])
    metrics = {"letters": len(said), "boxes": said.count("boxed")}
    return {"response": said, "reward": 2.0 * (len(said) % 2), "metrics": metrics}
"""
COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": task["prompt"], "max_tokens": 12}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
    said = json.load(response)["choices"][0]["message"]["content"]
print(json.dumps({"response": said, "reward": len(said) % 2, "metrics": {"secrets": len(
    [name for name in os.environ if name.endswith("_KEY") and name != "OPENAI_API_KEY"])}}))
"""


@pytest.fixture(scope="module")
def engine(shared_engine: Any, calling_settings: EngineSettings) -> Any:
    return shared_engine.of(calling_settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("agent")
    (made / "agent.py").write_text(WORKFLOW)
    (made / "command.py").write_text(COMMAND)
    return made


def rollout_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"agent": {"workflow": f"{folder}/agent.py:run", "folder": str(folder)}, "workers": 2, **changes}


def use(engine: Any, rollout: dict[str, Any], **changes: Any) -> str:
    config = Config.model_validate({"rollout": rollout})
    needs_reward = config.rollout.weights.workflow > 0
    given = {"models": {ALIAS: ALIAS}, "trained": ALIAS, "max_turns": 16, **changes}
    setup = ProgramSetup(needs_reward=needs_reward, **given)
    [found] = ray_cluster.wait([engine.use_program.remote(config.model_dump(mode="json"), setup)])
    return str(found)


def task(name: str, question: Question, **metadata: Any) -> RoundTask:
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
    line = {"task_id": name, "main_query": question.text, "prompt": prompt, "metadata": metadata}
    return round_task(name, question.text, reference="", prompt=prompt, agent="program", line=line)


def prompts(engine: Any, count: int = 6, **metadata: Any) -> list[Prompt]:
    some = [task(f"t-{at}", question, **metadata) for at, question in enumerate(questions()[:: 300 // count][:count])]
    [(made, refused)] = ray_cluster.wait([engine.encode.remote(some)])
    assert refused == {}
    return list(made)


def generate(engine: Any, some: list[Prompt], **changes: Any) -> list[Completion]:
    wanted = [RolloutRequest(prompt, 0, place, 1.0, 128, None) for place, prompt in enumerate(some)]
    found = ray_cluster.wait([engine.generate.remote(replace(request, **changes)) for request in wanted])
    return list(found)


def test_the_calls_of_a_workflow_are_the_samples(engine: Any, folder: Path) -> None:
    assert use(engine, rollout_settings(folder)) == f"async def run(task, model, logger=None) in {folder}/agent.py"
    for made in generate(engine, prompts(engine)):
        assert (made.error, made.cause, made.turns) == ("", "", 2)
        assert len(made.samples) == 1 + made.forks
        assert made.run is not None
        assert made.run.metrics == {"letters": len(made.text), "boxes": made.text.count("boxed")}
        assert made.run.reward == 2.0 * (len(made.text) % 2)
        # For the judge: what was said between question and answer, as text.
        assert all(isinstance(step["content"], str) for step in made.steps)
        if made.forks:
            continue
        steps = made.steps
        assert [step["role"] for step in steps] == ["assistant", "user"]
        [sample], [texts] = made.samples, made.texts
        own = "".join(str(text) for text, mine in zip(texts, sample.loss_mask, strict=True) if mine)
        assert own.replace("<|im_end|>", "") == steps[0]["content"] + made.text
        assert sum(sample.loss_mask) == len(made.token_ids)


def test_a_command_is_asked_with_the_task_and_sees_no_secret(engine: Any, folder: Path) -> None:
    rollout = rollout_settings(folder, agent={"command": [sys.executable, "command.py"], "folder": str(folder)})
    assert use(engine, rollout).startswith(f"command {sys.executable} command.py")
    for made in generate(engine, prompts(engine, 3)):
        assert (made.error, made.turns, len(made.samples), made.forks) == ("", 1, 1, 0)
        assert made.run is not None
        assert (made.run.reward, made.run.metrics) == (len(made.text) % 2, {"secrets": 0.0})
        assert made.steps == ()


def test_limits_truncate(engine: Any, folder: Path) -> None:
    """The agent fails because its calls are refused: it is graded as far as it came."""
    use(engine, rollout_settings(folder), max_turns=3)
    for made in generate(engine, prompts(engine, 3, does="loop")):
        assert (made.error, made.truncated, made.turns) == ("", True, 3)
    use(engine, rollout_settings(folder))
    for made in generate(engine, prompts(engine, 3, does="loop"), max_tokens=20):
        assert (made.error, made.truncated) == ("", True)
        assert len(made.token_ids) <= 20
    # The context is full.
    for made in generate(engine, prompts(engine, 3, does="loop")):
        assert (made.error, made.truncated) == ("", True)
    # Only the workflow could say what it is worth.
    use(engine, rollout_settings(folder, reward={"workflow": 1}), max_turns=3)
    for made in generate(engine, prompts(engine, 3, does="loop")):
        assert (made.cause, made.truncated) == ("raised", True)


def test_a_limit_that_the_agent_sets_for_its_calls_truncates_nothing(engine: Any, folder: Path) -> None:
    """It asks for 12 tokens at most. The rollout's limits count, also where the agent goes on after them."""
    use(engine, rollout_settings(folder))
    some = prompts(engine, 3)
    own = generate(engine, some)
    assert max(len(made.token_ids) for made in own) > 12
    assert [made.truncated for made in own] == [False] * 3
    assert [made.truncated for made in generate(engine, some, max_turn_tokens=4)] == [True] * 3


def test_other_targets_answer_with_their_adapters_and_are_not_trained(
    engine: Any, folder: Path, tmp_path: Path
) -> None:
    """At nearly no temperature all answers are those of the adapters; the samples have the trained one's alone."""
    use(engine, rollout_settings(folder))
    [alone] = prompts(engine, 1, does="one turn")
    says: dict[str, LoadedAdapter | None] = {}
    for number in range(51, 60):
        adapter = strange_adapter(engine, number, tmp_path / f"a{number}") if says else None
        [made] = generate(engine, [alone], adapter=adapter, temperature=0.01)
        if adapter is not None and made.text in says:
            ray_cluster.wait([engine.unload.remote(adapter)])
        says.setdefault(made.text, adapter)
        if len(says) == 3:
            break
    (base, _), (theirs, other), (mine, own) = says.items()
    use(
        engine,
        rollout_settings(folder),
        models={"planner": "plan", "writer": "write", "critic": "criticize"},
        trained="planner",
        frozen={"write": other, "criticize": None},
    )
    [asked] = prompts(engine, 1, does="ask others")
    for as_served in (False, True):
        [found] = generate(engine, [asked], adapter=own, temperature=0.01, as_served=as_served)
        assert (found.error, found.turns, found.forks) == ("", 1, 0)
        [sample], [texts] = found.samples, found.texts
        trained = "".join(str(text) for text, is_own in zip(texts, sample.loss_mask, strict=True) if is_own)
        assert trained.replace("<|im_end|>", "") == mine
        # In training, the others are sampled as the server does.
        assert json.loads(found.text)[0] == mine
        assert not as_served or json.loads(found.text) == [mine, theirs, base]
    ray_cluster.wait([engine.unload.remote(adapter) for adapter in (own, other)])


@pytest.mark.extended
def test_a_round_trains_on_the_calls_of_a_command(
    engine: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = rollout_settings(folder, agent={"command": [sys.executable, "command.py"], "folder": str(folder)})
    some = questions()[::40]
    train = [task(f"t-{at}", some[at]) for at in range(12)]
    held_out = [task(f"h-{at}", some[12 + at]) for at in range(10)]
    result = run_round(engine, tmp_path, monkeypatch, train, held_out, max_completion_tokens=64, **rollout)
    assert (result.outcome, result.steps) == ("trained", 2), result.reason
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all((weight != 0).any() for name, weight in weights.items() if "lora_B" in name)
    steps = [line for line in lines(tmp_path / "metrics.jsonl") if line["event"] == "step"]
    assert len(steps) == 2
    for step in steps:
        assert step["program"]["failures"] == {}
        assert step["program"]["metrics"] == {"secrets": 0.0}
        assert step["logprob_gap"] < 1e-2
        assert step["trained_tokens"] > 0
    written = list(rollout_file.rollouts(tmp_path))
    assert len(written) == 2 * 4 * 6
    for line in written:
        assert line["program"]["failure"] is None
        assert line["error"] == ""
    comparison = result.comparison
    assert comparison is not None
    assert (comparison.tasks, comparison.undecided, comparison.candidate_failed) == (10, 0, 0)
    assert result.probe is not None
    assert result.seconds["trial"] > 0
