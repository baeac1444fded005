"""The probe: tokens whose log-probabilities tell an adapter from its base model, measured on a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flywheel.round import Probe
from flywheel.training.cluster import wait
from flywheel.training.prompts import Prompt
from flywheel.training.rollout import LoadedAdapter

PROMPTS = 8
TOKENS = 16


def make_probe(engine: Any, prompts: Sequence[Prompt], adapter: LoadedAdapter, *, max_model_len: int) -> Probe:
    """Of the first prompts, the one whose greedy continuation under the adapter tells it best from the base model.

    The continuation runs on past the end of the turn, so that it always has the same length.
    """
    probes = [_probe(engine, prompt, adapter, max_model_len) for prompt in prompts[:PROMPTS]]
    return max(probes, key=distance)


def distance(probe: Probe) -> float:
    """Mean difference of the two log-probabilities per token."""
    pairs = zip(probe.adapter_logprobs, probe.base_logprobs, strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(probe.token_ids)


def _probe(engine: Any, prompt: Prompt, adapter: LoadedAdapter, max_model_len: int) -> Probe:
    ids = list(prompt.token_ids)
    # One place is kept free: scoring generates a token that nobody needs.
    tokens = min(TOKENS, max_model_len - len(ids) - 1)
    [continuation] = wait([engine.continue_greedily.remote(ids, adapter, tokens=tokens)])
    # One after the other: scoring a prompt beside any other request kills vLLM 0.32 on a CPU with LoRA enabled.
    [with_adapter] = wait([engine.score.remote(ids, continuation, adapter)])
    [with_base] = wait([engine.score.remote(ids, continuation, None)])
    return Probe(
        prompt_token_ids=ids,
        token_ids=continuation,
        adapter_logprobs=with_adapter,
        base_logprobs=with_base,
    )
