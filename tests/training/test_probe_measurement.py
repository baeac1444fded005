"""The tokens by which an adapter is proven: those that tell it best from what is nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flywheel.training import probe_measurement as probe_module
from flywheel.training.probe_measurement import COMPARED, PROMPTS, TOKENS, make_probe
from flywheel.training.rollout import LoadedAdapter
from tests.training.rollouts import prompt

NEW, PARENT = LoadedAdapter("r0002", 1, "/r0002"), LoadedAdapter("r0001", 2, "/r0001")
SHORT = prompt("t-short", (1,) * 10)
TELLING = prompt("t-telling", (2,) * 12)
LONG = [prompt(f"t-{number}", (3,) * (20 + number)) for number in range(PROMPTS)]


class Method:
    def __init__(self, answer: Any) -> None:
        self.remote = answer


class Weights:
    """An engine whose log-probabilities are known: the parent's differ in every second token, by 0.2 behind the
    telling prompt and by 0.01 behind others; the base model's everywhere and by far. A second measurement is off by
    `noise`."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise
        self.continue_greedily = Method(lambda ids, adapter, tokens: [ids[0]] * tokens)
        self.score = Method(self._score)

    def _score(self, ids: Sequence[int], tokens: Sequence[int], adapter: LoadedAdapter | None) -> list[float]:
        start = {1: 10, 2: 12}.get(ids[0], 20)
        far = 0.2 if ids[0] == 2 else 0.01
        found = []
        for place in range(len(ids) - start, len(ids) - start + len(tokens)):
            apart = 0.0
            if adapter is None:
                apart = 1.0
            elif adapter is PARENT:
                apart = far * (place % 2)
            elif len(tokens) == 1:
                apart = self.noise
            found.append(-2.0 + apart)
        return found


def made(engine: Weights, parent: LoadedAdapter | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(probe_module, "wait", lambda values: values)
    return make_probe(engine, [*LONG, SHORT, TELLING], NEW, parent, max_model_len=4096)


def test_the_text_and_the_tokens_that_tell_it_best_from_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = made(Weights(), PARENT, monkeypatch)
    assert probe.prompt_token_ids == [2] * 12
    assert len(probe.token_ids) == TOKENS
    assert probe.places == list(range(1, TOKENS, 2))
    assert len(probe.places) == COMPARED
    assert [probe.parent_logprobs[place] for place in probe.places] == pytest.approx([-1.8] * COMPARED)
    assert probe.adapter_logprobs == [-2.0] * TOKENS
    assert probe.base_logprobs == [-1.0] * TOKENS
    assert probe.noise == 0


def test_noise_is_how_far_a_second_measurement_of_the_adapter_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(Weights(noise=0.03), PARENT, monkeypatch).noise == pytest.approx(0.03)


def test_without_a_parent_the_base_model_is_what_it_is_told_from(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = made(Weights(), None, monkeypatch)
    assert probe.parent_logprobs is None
    assert len(probe.places) == COMPARED


def test_long_prompts_are_not_measured_where_there_are_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of a long prompt fill the memory of a GPU."""
    engine = Weights()
    lengths: list[int] = []
    greedily = engine.continue_greedily.remote
    engine.continue_greedily = Method(
        lambda ids, adapter, tokens: lengths.append(len(ids)) or greedily(ids, adapter, tokens)
    )
    made(engine, PARENT, monkeypatch)
    assert sorted(lengths) == [10, 12, *range(20, 20 + PROMPTS - 2)]


def test_a_prompt_at_the_end_of_the_context_has_a_token_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "wait", lambda values: values)
    probe = make_probe(Weights(), [SHORT], NEW, PARENT, max_model_len=12)
    assert (len(probe.token_ids), probe.places) == (1, [0])
