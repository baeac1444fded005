"""The probe: tokens whose log-probabilities distinguish an adapter from its parent and its base model, measured on a
rollout engine, with the accuracy of the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flywheel.round import Probe
from flywheel.training.prompts import Prompt
from flywheel.training.ray_cluster import wait
from flywheel.training.rollout import LoadedAdapter

PROMPTS = 8
TOKENS = 32
COMPARED = 16
"""Number of compared tokens per continuation: those that differ most, since most tokens of a text are nearly
certain."""


def make_probe(
    engine: Any,
    prompts: Sequence[Prompt],
    adapter: LoadedAdapter,
    parent: LoadedAdapter | None,
    *,
    max_model_len: int,
) -> Probe:
    """Of the shortest prompts, the one whose greedy continuation under the adapter differs most from its parent or
    the base model (a `parent` of None), whichever is nearer.

    The continuation continues past the end of the turn, so that it always has the same length.
    """
    # Log-probabilities of a long prompt take gigabytes: a row of the vocabulary for each of its tokens.
    shortest = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:PROMPTS]
    probes = [_probe(engine, prompt, adapter, parent, max_model_len) for prompt in shortest]
    best = max(probes, key=distance)
    return best.model_copy(update={"noise": _noise(engine, best, adapter)})


def distance(probe: Probe) -> float:
    """Mean difference per compared token between the adapter and the nearer of parent and base model, in nats."""
    differences = _differences(probe)
    return sum(differences[place] for place in probe.compared) / len(probe.compared)


def choose_places(probe: Probe) -> list[int]:
    """The positions where the adapter differs most from the nearer of parent and base model, in order."""
    differences = _differences(probe)
    return sorted(sorted(range(len(differences)), key=differences.__getitem__, reverse=True)[:COMPARED])


def _differences(probe: Probe) -> list[float]:
    others = [other for other in (probe.parent_logprobs, probe.base_logprobs) if other is not None]
    by_token = [[abs(a - b) for a, b in zip(probe.adapter_logprobs, other, strict=True)] for other in others]
    return min(by_token, key=sum)


def _probe(
    engine: Any, prompt: Prompt, adapter: LoadedAdapter, parent: LoadedAdapter | None, max_model_len: int
) -> Probe:
    ids = list(prompt.token_ids)
    # One position stays free: scoring also generates one token.
    tokens = min(TOKENS, max_model_len - len(ids) - 1)
    [continuation] = wait([engine.continue_greedily.remote(ids, adapter, tokens=tokens)])
    # One after the other: scoring a prompt beside any other request kills vLLM 0.32 on a CPU with LoRA enabled.
    [with_adapter] = wait([engine.score.remote(ids, continuation, adapter)])
    [with_base] = wait([engine.score.remote(ids, continuation, None)])
    [with_parent] = wait([engine.score.remote(ids, continuation, parent)]) if parent else [None]
    probe = Probe(
        prompt_token_ids=ids,
        token_ids=continuation,
        adapter_logprobs=with_adapter,
        base_logprobs=with_base,
        parent_logprobs=with_parent,
    )
    return probe.model_copy(update={"places": choose_places(probe)})


def _noise(engine: Any, probe: Probe, adapter: LoadedAdapter) -> float:
    """The difference to a second measurement in nats per token, one token at a time as on a server: other lengths use
    other kernels with another order of operations."""
    ids = probe.prompt_token_ids + probe.token_ids
    start = len(probe.prompt_token_ids)
    total = 0.0
    for place in probe.compared:
        at = start + place
        [[again]] = wait([engine.score.remote(ids[:at], ids[at : at + 1], adapter)])
        total += abs(again - probe.adapter_logprobs[place])
    return total / len(probe.compared)
