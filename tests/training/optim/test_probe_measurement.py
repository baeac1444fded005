"""The tokens by which an adapter is proven: those that tell it best from its parent and the base model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flywheel.records.round import Probe
from flywheel.serving.client import weight_verification
from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.optim import probe_measurement as probe_module
from flywheel.training.optim.probe_measurement import PROMPTS, TOKENS, make_probe
from tests.training.data.rollouts import prompt

PLACES = weight_verification.PLACES[-1]
NEW, PARENT = LoadedAdapter("r0002", 1), LoadedAdapter("r0001", 2)
SHORT = prompt("t-short", (1,) * 10)
TELLING = prompt("t-telling", (2,) * 12)
LONG = [prompt(f"t-{number}", (3,) * (20 + number)) for number in range(PROMPTS)]


class Method:
    def __init__(self, answer: Any) -> None:
        self.remote = answer


class Weights:
    """An engine whose log-probabilities are known: adapter and parent differ in every second token, by `far` behind
    the telling prompt and by 0.01 behind others, and the base model differs from both in the tokens between, by as
    much. What is measured token by token is off by `noise`."""

    def __init__(self, noise: float = 0.0, far: float = 0.2) -> None:
        self.noise = noise
        self.far = far
        self.sampled: list[int] = []
        self.measured: list[tuple[str, int]] = []
        self.sample = Method(self._sample)
        self.score = Method(
            lambda ids, tokens, adapter: [self._logprob(ids, at, adapter) for at in range(len(tokens))]
        )
        self.score_next = Method(self._score_next)

    def _sample(self, ids: Sequence[int], adapter: LoadedAdapter, tokens: int) -> list[int]:
        assert adapter is NEW
        self.sampled.append(len(ids))
        return [ids[0]] * tokens

    def _score_next(self, ids: Sequence[int], token: int, adapter: LoadedAdapter | None) -> float:
        assert token == ids[0]
        start = {1: 10, 2: 12}[ids[0]] if ids[0] in (1, 2) else 20
        self.measured.append((adapter.name if adapter else "base", len(ids)))
        return self._logprob(ids[:start], len(ids) - start, adapter) + self.noise

    def _logprob(self, ids: Sequence[int], place: int, adapter: LoadedAdapter | None) -> float:
        far = self.far if ids[0] == 2 else 0.01
        if adapter is None:
            return -2.0 + far * (1 - place % 2)
        return -2.0 + far * (place % 2) * (adapter is PARENT)


def made(
    engine: Weights, parent: LoadedAdapter | None, monkeypatch: pytest.MonkeyPatch, context: int = 4096
) -> Probe:
    monkeypatch.setattr(probe_module, "wait", lambda values: values)
    return make_probe(engine, [*LONG, SHORT, TELLING], NEW, parent, max_model_len=4096)


def test_the_tokens_that_tell_most_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = made(Weights(), PARENT, monkeypatch)
    assert len(probe.texts) == PROMPTS
    assert probe.tasks[:2] == [SHORT.task.task_id, TELLING.task.task_id]
    assert [len(text) for text in probe.texts[:2]] == [10 + TOKENS, 12 + TOKENS]
    assert len(set(probe.places)) == len(probe.places) == PLACES
    assert {text for text, _ in probe.places[:128]} == {1}, "the telling one is the second shortest"
    assert all(12 <= place < 12 + TOKENS for text, place in probe.places if text == 1)


def test_each_token_is_recorded_in_two_batch_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Weights(noise=0.03)
    probe = made(engine, PARENT, monkeypatch)
    for name in ("adapter", "base", "parent"):
        first, second = getattr(probe.first, name), getattr(probe.second, name)
        assert len(first) == len(second) == PLACES
        assert second == pytest.approx([value + 0.03 for value in first])
    for (text, place), logprob in zip(probe.places, probe.first.base, strict=True):
        assert logprob == pytest.approx(
            engine._logprob(probe.texts[text], place - len(probe.texts[text]) + TOKENS, None)
        )
    for name in ("r0002", "base", "r0001"):
        assert [length for model, length in engine.measured if model == name] == [place for _, place in probe.places]


def test_few_more_tokens_are_recorded_than_a_noisy_replica_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a noise of 0.1, the error of 64 tokens that differ by 0.6 is 0.021, of 128 that differ by 0.3 0.029. A
    quarter more is recorded, in case that texts have to be removed."""
    assert len(made(Weights(far=0.6), None, monkeypatch).places) == 80
    assert len(made(Weights(far=0.3), None, monkeypatch).places) == 160
    assert len(made(Weights(far=0.1), None, monkeypatch).places) == PLACES


def test_the_engines_own_noise_needs_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alternating(Weights):
        def _score_next(self, ids: Sequence[int], token: int, adapter: LoadedAdapter | None) -> float:
            sign = 1 if len(self.measured) % 3 else -2
            return super()._score_next(ids, token, adapter) + sign * 0.05

    assert len(made(Alternating(far=0.6), None, monkeypatch).places) > 80


def test_without_a_parent_there_is_one_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = made(Weights(), None, monkeypatch)
    assert probe.first.parent is probe.second.parent is None
    assert probe.first.versions == [probe.first.base, probe.first.adapter]
    assert len(probe.places) == PLACES


def test_long_prompts_are_not_measured_where_there_are_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of a long prompt fill the memory of a GPU."""
    engine = Weights()
    made(engine, PARENT, monkeypatch)
    assert sorted(engine.sampled) == [10, 12, *range(20, 20 + PROMPTS - 2)]


def test_continuations_end_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "wait", lambda values: values)
    probe = make_probe(Weights(), [SHORT], NEW, PARENT, max_model_len=12)
    assert (len(probe.texts[0]), probe.places) == (11, [(0, 10)])
