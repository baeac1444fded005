"""The rollout engine: real vLLM in a real Ray actor. What a round relies on, and what a CPU must not get wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import questions
from flywheel.config.training import LoraSettings
from flywheel.errors import TrainError
from flywheel.training.data import rollout_file
from flywheel.training.data.prompts import Prompt, schedule
from flywheel.training.data.rollout import Completion, LoadedAdapter, RolloutRequest
from flywheel.training.data.round_directory import settings_of
from flywheel.training.data.samples import CallTokens
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.engine import Engine, StartedEngine
from flywheel.training.engine.policy import AdapterFiles
from flywheel.training.optim.rollout_grading import build_grade
from flywheel.training.optim.round_steps import step_requests
from flywheel.training.worker.processes import EngineAdapters
from flywheel.training.worker.round import Round
from tests.factories.engine import generate, load, settings, strange_adapter
from tests.factories.round import POLICY
from tests.factories.task import round_task
from tests.factories.worker import GROUP, PROMPTS
from tests.factories.worker import spec as round_spec

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def engine(shared_engine: Any, model: Path) -> Any:
    return shared_engine.of(settings(str(model)))


@pytest.fixture(scope="module")
def prompts(engine: Any) -> list[Prompt]:
    some = [round_task(f"t-{place}", question.text) for place, question in enumerate(questions()[::150])]
    [(made, refused)] = ray_cluster.wait([engine.encode.remote(some)])
    assert (len(made), refused) == (len(some), {})
    prompts: list[Prompt] = made
    return prompts


def requests(prompts: list[Prompt], adapter: LoadedAdapter | None, seed: int = 0) -> list[RolloutRequest]:
    return [RolloutRequest(prompt, 0, seed + place, 1.0, 12, adapter) for place, prompt in enumerate(prompts)]


def asked(engine: Any, request: RolloutRequest) -> tuple[CallTokens, ...]:
    """The calls of an agent that asks the question of a request once."""
    [url] = ray_cluster.wait([engine.open_session.remote(request)])
    body = {"model": "policy", "messages": request.prompt.task.prompt}
    response = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    [calls] = ray_cluster.wait([engine.close_session.remote(url)])
    found: tuple[CallTokens, ...] = calls
    return found


def agreeing(left: list[Completion], right: list[Completion]) -> float:
    """Share of completions with the same tokens. Another batch may turn a tie; other weights turn almost all."""
    return sum(a.token_ids == b.token_ids for a, b in zip(left, right, strict=True)) / len(left)


def test_a_seed_gives_the_same_tokens_again(engine: Any, prompts: list[Prompt]) -> None:
    first = generate(engine, requests(prompts, None))
    assert agreeing(first, generate(engine, requests(prompts, None))) >= 0.9
    assert agreeing(first, generate(engine, requests(prompts, None, seed=1000))) < 0.5


def test_a_completion_is_whole(engine: Any, prompts: list[Prompt]) -> None:
    for completion in generate(engine, requests(prompts, None)):
        assert len(completion.token_ids) == len(completion.logprobs) > 0
        assert all(value is not None and value <= 0 for value in completion.logprobs)
        assert "<|im_end|>" not in completion.text
        assert completion.truncated == (len(completion.token_ids) == 12 and completion.token_ids[-1] != 2)
    short = [replace(request, max_turn_tokens=5) for request in requests(prompts, None)]
    assert max(len(completion.token_ids) for completion in generate(engine, short)) == 5


def test_after_each_sync_the_engine_answers_with_the_new_weights_and_not_with_the_old(
    engine: Any, prompts: list[Prompt], tmp_path: Path
) -> None:
    """As in a round: the weights change, and are synced under a new name. Replies and rollouts through the chat
    endpoint are both sampled from the new weights."""
    import torch

    from tests.factories.policy import load_policy, save_adapter

    adapter: LoadedAdapter | None = None

    def gap(generated: list[CallTokens]) -> float:
        """The mean difference of the engine's logprobs to those of the trainer's weights, in nats per token."""
        differences: list[float] = []
        for call in generated:
            with torch.no_grad():
                logits = model(torch.tensor([[*call.prompt_ids, *call.token_ids]])).logits[0]
            rows = logits.log_softmax(-1)[len(call.prompt_ids) - 1 : -1]
            own = rows.gather(1, torch.tensor(call.token_ids)[:, None])[:, 0].tolist()
            differences += [abs(float(told or 0) - at) for told, at in zip(call.logprobs, own, strict=True)]
        return sum(differences) / len(differences)

    def replies() -> list[CallTokens]:
        done = generate(engine, requests(prompts, adapter))
        return [
            CallTokens(prompt.token_ids, each.token_ids, each.logprobs, (), identity=(), reply="")
            for prompt, each in zip(prompts, done, strict=True)
        ]

    def through_the_endpoint() -> list[CallTokens]:
        return [call for request in requests(prompts, adapter) for call in asked(engine, request)]

    model = load_policy(str(POLICY), None, LoraSettings(r=8, alpha=16), seed=5)
    adapters = EngineAdapters([engine])
    weights = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    for step in range(3):
        old = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(torch.randn_like(weight) * 0.3)
        save_adapter(model, tmp_path / f"step-{step}")
        adapter = adapters.load("r0001", AdapterFiles.read(tmp_path / f"step-{step}"))
        both = replies(), through_the_endpoint()
        assert len(both[1]) == len(prompts)
        for drawn in both:
            assert gap(drawn) < 1e-3
        new = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight, before in zip(weights, old, strict=True):
                weight.copy_(before)
        for drawn in both:
            assert gap(drawn) > 0.05
        with torch.no_grad():
            for weight, after in zip(weights, new, strict=True):
                weight.copy_(after)
        adapters.unload(adapter)


def test_base_and_adapters_in_one_batch_answer_as_they_do_alone(
    engine: Any, prompts: list[Prompt], adapters: list[LoadedAdapter]
) -> None:
    """vLLM on a CPU gives base requests the last slot's adapter when any other is in the batch."""
    sides = [None, *adapters]
    alone = [generate(engine, requests(prompts, side)) for side in sides]
    mixed = generate(engine, [request for side in sides for request in requests(prompts, side)])
    for place, side in enumerate(alone):
        assert agreeing(side, mixed[place * len(prompts) : (place + 1) * len(prompts)]) >= 0.9
    assert agreeing(alone[0], alone[1]) < 0.5
    assert agreeing(alone[1], alone[2]) < 0.5


def test_an_adapter_makes_room_for_the_next(
    engine: Any, prompts: list[Prompt], adapters: list[LoadedAdapter], tmp_path: Path
) -> None:
    """As a round does step by step: load the new one, drop the old one, and the base stays the base."""
    base = generate(engine, requests(prompts, None))
    ray_cluster.wait([engine.unload.remote(adapters.pop())])
    old = strange_adapter(engine, 2, tmp_path / "adapter")
    for number in range(3, 9):
        ray_cluster.wait([engine.unload.remote(old)])
        new = load(engine, number, tmp_path / "adapter")
        both = generate(engine, [*requests(prompts, None), *requests(prompts, new)])
        assert agreeing(base, both[: len(prompts)]) >= 0.9
        assert agreeing(base, both[len(prompts) :]) < 0.5
        old = new
    ray_cluster.wait([engine.unload.remote(old)])
    load(engine, 9, tmp_path / "adapter")


def test_scores_are_those_of_the_tokens_it_generated(engine: Any, prompts: list[Prompt]) -> None:
    [completion] = generate(engine, requests(prompts[:1], None))
    [scores] = ray_cluster.wait([engine.score.remote(prompts[0].token_ids, completion.token_ids, None)])
    assert scores == pytest.approx(list(completion.logprobs), abs=1e-3)
    ids = [*prompts[0].token_ids, *completion.token_ids]
    by_token = ray_cluster.wait(
        [engine.score_next.remote(ids[:at], ids[at], None) for at in range(len(prompts[0].token_ids), len(ids))]
    )
    assert by_token == pytest.approx(scores, abs=1e-3)
    first, again = ray_cluster.wait([engine.sample.remote(prompts[0].token_ids, None, tokens=16) for _ in range(2)])
    assert len(first) == 16
    assert first == again


def test_rollouts_to_learn_from_are_drawn_from_the_policy_whatever_its_defaults_are(
    engine: Any, prompts: list[Prompt]
) -> None:
    """With a top_k of 1 each logprob were 0, with a penalty none were that of the policy."""
    drawn = generate(engine, requests(prompts, None))
    assert max(len(completion.token_ids) for completion in drawn) > 5
    assert agreeing(drawn, generate(engine, requests(prompts, None, seed=1000))) < 0.5
    for prompt, completion in list(zip(prompts, drawn, strict=True))[:4]:
        [scores] = ray_cluster.wait([engine.score.remote(prompt.token_ids, completion.token_ids, None)])
        assert scores == pytest.approx(list(completion.logprobs), abs=1e-3)


def test_logprobs_are_those_at_the_temperature_of_the_round(engine: Any, prompts: list[Prompt]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    [drawn] = generate(engine, [replace(requests(prompts[:1], None)[0], temperature=2.0)])
    ids = [*prompts[0].token_ids, *drawn.token_ids]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(POLICY)(torch.tensor([ids])).logits[0]
    rows = (logits / 2.0).log_softmax(-1)[len(prompts[0].token_ids) - 1 : -1]
    expected = rows.gather(1, torch.tensor(drawn.token_ids)[:, None])[:, 0].tolist()
    assert list(drawn.logprobs) == pytest.approx(expected, abs=1e-3)


def test_the_gates_answers_are_drawn_as_the_server_draws_them(engine: Any, prompts: list[Prompt]) -> None:
    def served(seed: int, temperature: float | None) -> list[Completion]:
        return generate(
            engine,
            [
                replace(request, as_served=True, max_tokens=None, temperature=temperature)
                for request in requests(prompts, None, seed)
            ],
        )

    first = served(0, None)
    assert max(len(completion.token_ids) for completion in first) == 5
    assert agreeing(first, served(1000, None)) >= 0.9, "the likeliest token alone is left"
    assert agreeing(first, served(1000, 2.0)) >= 0.9, "the agent's temperature changes nothing else"


def test_a_debug_round_rolls_out_and_trains_nothing(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole round, with the engine that is there."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with judge.running() as url:
        spec = round_spec(url, round_id="debug", debug=True, held_out=[])
        whole = Round(spec, tmp_path, settings_of(spec), build_grade)

        def start() -> None:
            whole.engines[:], whole.about = [engine], StartedEngine("cpu", 2048)

        monkeypatch.setattr(whole, "start", start)
        result = whole.run()
    assert (result.outcome, result.adapter, result.steps) == ("debug", None, 2)
    assert "of 8 groups have rewards that differ" in result.reason
    assert not (tmp_path / "adapter").exists()
    rolled_out = list(rollout_file.rollouts(tmp_path))
    assert {line["step"] for line in rolled_out} == {1, 2}
    # The same seeds on the same weights: what a round would see in its first step.
    prompts = whole.prompts.to_train(spec.train).prompts
    [first, *_] = schedule(len(prompts), per_step=PROMPTS, steps=2, seed=spec.seed)
    wanted = step_requests([prompts[place] for place in first], 0, spec, whole.settings, None)
    same = [
        [*request.prompt.token_ids, *completion.token_ids] == line["samples"][0]["token_ids"]
        for request, completion, line in zip(wanted, generate(engine, wanted), rolled_out, strict=False)
    ]
    assert len(same) == PROMPTS * GROUP
    # Another batch may turn a tie.
    assert sum(same) >= 0.9 * len(same)


def test_a_model_that_is_none_is_said_to_be_none(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    actor = ray_cluster.start(Engine, settings(str(tmp_path)), gpus=0)
    with pytest.raises(TrainError, match=f"cannot load base model {tmp_path}"):
        ray_cluster.wait([actor.start.remote()])
    ray.kill(actor)
