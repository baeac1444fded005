"""The probe: tokens whose log-probabilities distinguish an adapter from its parent and its base model, measured twice
on a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flywheel.records.round import Probe, Recording
from flywheel.serving.client.weight_verification import LARGEST_ERROR, PLACES, expected_error
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import LoadedAdapter
from flywheel.training.engine.ray_cluster import wait

PROMPTS = 8
TOKENS = 256
"""Tokens of a continuation. Few tokens of a text tell versions apart, so there are more than are compared."""
SPARE = 4
"""One place more for so many that suffice: the texts of some prompts may have to be removed (`flywheel forget`)."""


def make_probe(
    engine: Any,
    prompts: Sequence[Prompt],
    adapter: LoadedAdapter,
    parent: LoadedAdapter | None,
    *,
    max_model_len: int,
) -> Probe:
    """Tokens of continuations, sampled from the adapter at temperature 1, of the shortest prompts.

    A first recording, of whole texts, chooses the places; a second one measures them token by token, as many as a
    replica needs whose noise is larger than this engine's. Continuations go on past the end of the turn, so that
    their length does not depend on the adapter.
    """
    versions = {"adapter": adapter, "base": None, **({"parent": parent} if parent else {})}
    # Log-probabilities of a long prompt take gigabytes: a row of the vocabulary for each of its tokens.
    asked = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:PROMPTS]
    shortest = [list(prompt.token_ids) for prompt in asked]
    # One position stays free: scoring also generates one token.
    rooms = [min(TOKENS, max_model_len - len(ids) - 1) for ids in shortest]
    sampled = wait(
        [engine.sample.remote(ids, adapter, tokens=room) for ids, room in zip(shortest, rooms, strict=True)]
    )
    texts = list(zip(shortest, sampled, strict=True))
    # One after the other: scoring a prompt beside any other request kills vLLM 0.32 on a CPU with LoRA enabled.
    whole = {
        name: [logprob for text in texts for logprob in wait([engine.score.remote(*text, version)])[0]]
        for name, version in versions.items()
    }
    order = most_telling(Recording(**whole))
    every = [(at, len(ids) + place) for at, (ids, tokens) in enumerate(texts) for place in range(len(tokens))]
    joined = [ids + tokens for ids, tokens in texts]
    by_token: dict[str, list[float]] = {name: [] for name in versions}
    for number in (min(each + each // SPARE, PLACES[-1]) for each in PLACES):
        places = [every[at] for at in order[:number]]
        for name, version in versions.items():
            new = places[len(by_token[name]) :]
            by_token[name] += wait(
                [engine.score_next.remote(joined[text][:at], joined[text][at], version) for text, at in new]
            )
        probe = Probe(
            texts=joined,
            tasks=[prompt.task.task_id for prompt in asked],
            places=places,
            first=Recording(**{name: [logprobs[at] for at in order[:number]] for name, logprobs in whole.items()}),
            second=Recording(**by_token),
        )
        if expected_error(probe) <= LARGEST_ERROR / 2:
            break
    return probe


def most_telling(recording: Recording) -> list[int]:
    """All places by their leverage in a regression on the differences, the largest first: those where a version
    differs much, in a direction in which few others do."""
    differences = np.diff(recording.versions, axis=0).T  # (places, 1 or 2)
    inverse = np.linalg.pinv(differences.T @ differences)
    leverage = np.einsum("ni,ij,nj->n", differences, inverse, differences)
    return [int(at) for at in np.argsort(-leverage, kind="stable")]
