"""Rollouts of a user's agent on a real engine: its function or command runs in processes of the engine's pool, and
what is trained on are the tokens of its calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from safetensors.numpy import load_file

from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, questions
from flywheel.config.file import Config
from flywheel.errors import ConfigError, TrainError
from flywheel.records.round import RoundResult, RoundTask
from flywheel.records.verdict import Exchange, Verdict
from flywheel.training.data import rollout_file
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import Completion, LoadedAdapter, RewardWeights, RolloutRequest
from flywheel.training.data.round_directory import settings_of
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import EngineSettings
from flywheel.training.engine.rollout_engine import ProgramSetup
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.held_out_evaluation import answer
from flywheel.training.optim.rollout_grading import without_judge
from flywheel.training.worker.round import Round
from tests.agents.scripted_model import ScriptedModel
from tests.factories.engine import strange_adapter
from tests.factories.task import round_task
from tests.factories.worker import lines
from tests.factories.worker import spec as round_spec
from tests.serving.fake_vllm import running
from tests.training.data.rollouts import verdict
from tests.training.engine.ray_session.round_on_engine import run_round

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS = 40
ALIAS = "my-agent"
NOWHERE = "http://127.0.0.1:9/v1"
WORKFLOW = """
import asyncio, contextlib, json, urllib.error, urllib.request


def ask(messages, model):
    body = json.dumps({"model": model["model"], "messages": messages, "max_tokens": 12}).encode()
    url, headers = model["base_url"] + "/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]


async def run(task, model, logger=None):
    names = task["metadata"].get("names", ())
    does = task["metadata"].get("does", "")
    if does == "no call":
        return {"response": "7", "reward": 1.0}
    messages = list(task["prompt"])
    said = ask(messages, task["openai"])
    if does == "raise":
        raise RuntimeError("the shop is closed")
    if does == "ask by name":
        return {"response": json.dumps([said, *(ask(messages, {**task["openai"], "model": name}) for name in names)])}
    if does == "ask others":
        others = [ask(list(task["prompt"]), task["models"][name]) for name in ("writer", "critic")]
        return {"response": json.dumps([said, *others])}
    if does == "raise if odd" and len(said) % 2:
        raise RuntimeError("the shop is closed")
    if does == "nan":
        return {"response": said, "reward": float("nan")}
    if does == "no response":
        return 1.0
    if does == "hang":
        await asyncio.sleep(1000)
    while does == "loop":
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again"}]
        said = ask(messages, task["openai"])
    if does == "one too many":
        with contextlib.suppress(urllib.error.HTTPError):
            ask([*messages, {"role": "user", "content": "Again"}], task["openai"])
    elif does != "one turn":
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


@pytest.mark.parametrize(
    ("does", "cause", "says"),
    [
        ("raise", "raised", "RuntimeError: the shop is closed"),
        ("nan", "not_a_number", "nan"),
        ("no response", "no_response", "response"),
        ("no call", "no_calls", "the agent made no call of the model"),
        ("hang", "timeout", "it ran longer than 5 s"),
    ],
)
def test_a_run_that_fails_says_why(engine: Any, folder: Path, does: str, cause: str, says: str) -> None:
    use(engine, rollout_settings(folder, agent_timeout_seconds=5 if does == "hang" else 300, reward={"rubric": 1}))
    [made] = generate(engine, prompts(engine, 1, does=does))
    assert made.cause == cause
    assert says in made.error
    assert (made.text, made.truncated) == ("", False)


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


def test_names_that_nothing_decides_are_warned_of_once_a_round(
    engine: Any, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy answers them, and is trained on them; an auxiliary model's name is answered by it alone."""
    with running(ScriptedModel()) as url:
        others = {"user": {"base_url": f"{url}/v1", "model": "small"}}
        rollout = rollout_settings(folder, auxiliary_models=others)
        given = round_spec(NOWHERE).settings
        given["rollout"] |= rollout
        spec = round_spec(NOWHERE, settings=given)
        whole = Round(spec, tmp_path, settings_of(spec), without_judge)
        whole.engines[:] = [engine]
        use(engine, rollout)
        [asked] = prompts(engine, 1, does="ask by name", names=["user", "gpt-9"])
        with caplog.at_level("INFO"):
            [found] = generate(engine, [asked])
            assert json.loads(found.text)[1].startswith("You asked: ")
            assert (found.error, found.turns) == ("", 2)
            assert whole.agent.note_models() == {ALIAS: 1, "user": 1, "gpt-9": 1}
            generate(engine, [asked])
            assert whole.agent.note_models()["gpt-9"] == 2
            [other] = prompts(engine, 1, does="ask by name", names=["gpt-9", "gpt-10"])
            generate(engine, [other])
            whole.agent.note_models()
    noted = [(each.levelname, each.getMessage()) for each in caplog.records if each.name.endswith("worker")]
    assert [text.partition(", which")[0] for _, text in noted] == [
        f"models that the agent asks for: {ALIAS} 1 time, user 1 time, gpt-9 1 time",
        "the agent asks for gpt-9 1 time",
        "models that the agent asks for: gpt-10 1 time",
        "the agent asks for gpt-10 1 time",
    ]
    assert [level for level, _ in noted] == ["INFO", "WARNING"] * 2


def graded(shown: Exchange) -> Verdict:
    return verdict(float("boxed" in shown.answer))


def test_a_failed_run_costs_its_own_rollout(engine: Any, folder: Path) -> None:
    use(engine, rollout_settings(folder, workers=3))
    some = prompts(engine, 2, does="raise if odd")
    wanted = [RolloutRequest(prompt, group, seed, 1.0, TOKENS, None) for group, prompt in enumerate(some)
              for seed in range(8)]  # fmt: skip
    weights = RewardWeights(rubric=1, program=3)
    with Collector([engine], graded, max_thread=4, timeout_seconds=120, weights=weights) as collector:
        batch = collector.collect(wanted)
    failed = [rollout for rollout in batch.rollouts if rollout.completion.cause]
    ended = [rollout for rollout in batch.rollouts if not rollout.completion.cause]
    assert failed
    assert ended
    assert {rollout.failure for rollout in failed} == {
        f"the agent failed (raised): {rollout.completion.run.error}" for rollout in failed if rollout.completion.run
    }
    assert (batch.failed, batch.undecided) == ({"raised": len(failed)}, 0)
    for rollout in ended:
        run = rollout.completion.run
        assert run is not None
        assert run.reward is not None
        assert rollout.reward == pytest.approx((float("boxed" in rollout.completion.text) + 3 * run.reward) / 4)
    figures = batch.summary()["program"]
    assert figures["failures"] == {"raised": len(failed)}
    assert set(figures["metrics"]) == {"letters", "boxes"}
    for rollout, advantage in zip(batch.rollouts, batch.advantages(), strict=True):
        assert advantage is None or not rollout.completion.cause


def test_without_a_weight_of_the_rubric_the_judge_is_not_asked(engine: Any, folder: Path) -> None:
    def refuses(_: Exchange) -> Verdict:
        raise AssertionError("asked")

    use(engine, rollout_settings(folder, reward={"rubric": 0, "workflow": 1}))
    wanted = [RolloutRequest(prompt, 0, seed, 1.0, TOKENS, None) for seed, prompt in enumerate(prompts(engine, 4))]
    weights = RewardWeights(rubric=0, program=1)
    with Collector([engine], refuses, max_thread=1, timeout_seconds=120, weights=weights) as collector:
        batch = collector.collect(wanted)
    for rollout in batch.rollouts:
        assert rollout.reward == 2.0 * (len(rollout.completion.text) % 2)
        assert (rollout.verdict, rollout.failure) == (None, "")


def test_in_the_gate_a_run_that_fails_scores_as_a_miss(engine: Any, folder: Path, tmp_path: Path) -> None:
    use(engine, rollout_settings(folder))
    config = Config.model_validate({"gate": {"samples": 2, "min_tasks": 3}})
    held_out = [*prompts(engine, 1, does="raise"), *prompts(engine, 4)[1:]]
    candidate = strange_adapter(engine, 41, tmp_path / "a41")
    with Collector([engine], graded, max_thread=4, timeout_seconds=120) as collector:
        sides: tuple[LoadedAdapter | None, LoadedAdapter | None] = candidate, None
        found = answer(held_out, sides, round_spec("http://127.0.0.1:9/v1"), config, collector, tmp_path)
    ray_cluster.wait([engine.unload.remote(candidate)])
    others = [reward for _, deployed in found.rewards[1:] for reward in deployed if reward is not None]
    mean = sum(others) / len(others)
    assert (found.missed, found.failed) == ((0, 0), (2, 2))
    assert found.rewards[0] == ((0.0, 0.0), (pytest.approx(mean), pytest.approx(mean)))
    assert found.at_bound[0] == ((0.0, 0.0), (1.0, 1.0))
    assert len([line for line in lines(tmp_path / "evaluation.jsonl") if line["error"]]) == 4


def test_a_file_that_does_not_load_is_refused(engine: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.py"):
        use(engine, rollout_settings(folder, agent={"workflow": f"{folder}/gone.py:run"}))


def run_program_round(
    engine: Any,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    rollout: dict[str, Any],
    training: Mapping[str, Any] = MappingProxyType({}),
    **metadata: Any,
) -> RoundResult:
    some = questions()[::40]
    train = [task(f"t-{at}", some[at], **metadata) for at in range(12)]
    held_out = [task(f"h-{at}", some[12 + at], **metadata) for at in range(10)]
    given = {"max_completion_tokens": 64, **rollout}
    return run_round(engine, directory, monkeypatch, train, held_out, training, **given)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["workflow", "command"])
def test_a_round_trains_on_the_agents_own_calls(
    engine: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    agents = {
        "workflow": {"workflow": f"{folder}/agent.py:run", "folder": str(folder)},
        "command": {"command": [sys.executable, "command.py"], "folder": str(folder)},
    }
    result = run_program_round(
        engine, tmp_path, monkeypatch, rollout_settings(folder, agent=agents[kind]), does="one turn"
    )
    assert (result.outcome, result.steps) == ("trained", 2), result.reason
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all((weight != 0).any() for name, weight in weights.items() if "lora_B" in name)
    steps = [line for line in lines(tmp_path / "metrics.jsonl") if line["event"] == "step"]
    assert len(steps) == 2
    names = {"workflow": {"letters", "boxes"}, "command": {"secrets"}}
    for step in steps:
        assert step["program"]["failures"] == {}
        assert set(step["program"]["metrics"]) == names[kind]
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


@pytest.mark.extended
def test_a_round_that_trained_no_token_is_refused_with_the_reason(
    engine: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rollout asks for one call more than it may have. Their rewards differ."""
    rollout = rollout_settings(folder, max_turns=1, reward={"rubric": 0, "workflow": 1})
    masks = {"mask_truncated": True}
    result = run_program_round(engine, tmp_path, monkeypatch, rollout, masks, does="one too many")
    assert (result.outcome, result.steps, result.adapter) == ("refused", 0, None)
    assert "step 2 has no token to train" in result.reason
    assert "24 of 24 rollouts reached a limit" in result.reason
    assert [step["trained_tokens"] for step in lines(tmp_path / "metrics.jsonl") if step["event"] == "step"] == [0, 0]


@pytest.mark.extended
def test_an_agent_that_always_fails_is_refused_before_training(
    engine: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainError, match=r"it failed on 3 tasks before training.*the shop is closed") as refused:
        run_program_round(engine, tmp_path, monkeypatch, rollout_settings(folder), does="raise")
    assert not refused.value.retryable
    assert not rollout_file.rollout_files(tmp_path)


def test_settings_reach_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flywheel.training.program.program_pool import program_of

    assert program_of(Config()) is None
    given = {
        "agent": {"workflow": "agent.py:run"},
        "auxiliary_models": {"user": {"base_url": "http://user/v1", "model": "u", "api_key_env": "USER_SIM_KEY"}},
        "agent_memory_gb": 0.5,
        "reward": {"rubric": 0, "workflow": 1},
    }
    config = Config.model_validate({"rollout": given}, context=tmp_path)
    with pytest.raises(ConfigError, match="USER_SIM_KEY"):
        program_of(config)
    monkeypatch.setenv("USER_SIM_KEY", "key-of-the-user")
    program = program_of(Config.model_validate(json.loads(config.model_dump_json())))
    assert program is not None
    assert (program.workflow, program.folder) == (f"{tmp_path}/agent.py:run", str(tmp_path))
    assert (program.needs_response, program.needs_reward, program.memory_bytes) == (False, True, 500_000_000)
    assert program.auxiliary_models["user"].api_key == "key-of-the-user"
    assert "key-of-the-user" not in repr(program)
