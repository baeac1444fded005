"""The proof of weights: right ones pass, wrong ones never do, and what cannot be told is not promoted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.weights import RIGHT, TRAINED_ON, WRONG, Cell, counted
from flywheel.errors import Condition, ServeError
from flywheel.records.round import Probe, Recording
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.client.weight_verification import compare, prove
from tests.cases import for_each
from tests.serving.fake_vllm import BASE, PROBE, PROMPT_TOKENS, FakeVllm, replica

PLACES = 256


def logprobs(noise: float, *, parent: bool = True, difference: float = 0.1) -> tuple[dict[str, np.ndarray], Probe]:
    """Versions that differ by about 0.1 nats, and the probe that a round with such noise recorded of them."""
    random = np.random.default_rng(3)
    base = -random.exponential(1, PLACES)
    of_parent = base + random.laplace(0, difference, PLACES) * parent
    versions = {"adapter": of_parent + random.laplace(0, difference, PLACES), "base": base, "parent": of_parent}
    recordings = [
        {name: (values + random.normal(0, noise, PLACES)).tolist() for name, values in versions.items()}
        for _ in range(2)
    ]
    if not parent:
        recordings = [{**recording, "parent": None} for recording in recordings]
    first, second = (Recording.model_validate(recording) for recording in recordings)
    texts = [list(range(PROMPT_TOKENS + PLACES))]
    places = [(0, PROMPT_TOKENS + place) for place in range(PLACES)]
    return versions, Probe(texts=texts, places=places, first=first, second=second)


@pytest.mark.parametrize("parent", [False, True])
@pytest.mark.parametrize("ratio", [1, 4])
def test_right_weights_pass_and_wrong_ones_never_do(parent: bool, ratio: int) -> None:
    """A small version of `python -m benchmarks.weights`."""
    draws = 30
    found = counted(Cell(own=0.02, difference=0.02 * ratio, parent=parent), draws)
    assert found[RIGHT, "passed"] == draws
    assert {kind: found[kind, "passed"] for kind in WRONG} == dict.fromkeys(WRONG, 0)


def test_another_adapter_that_contains_this_one_is_seen_by_what_it_does_besides() -> None:
    """The slopes of weights that were trained on from the adapter are right."""
    found = counted(Cell(own=0.005, difference=0.05, parent=True, common=0.0), 30)
    assert found[TRAINED_ON, "passed"] <= 2
    assert found[TRAINED_ON, "refused"] >= 28


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_slopes_say_which_weights_answer(noise: float) -> None:
    versions, probe = logprobs(noise)
    base, parent, adapter = versions["base"], versions["parent"], versions["adapter"]
    for measured, slopes in (
        (adapter, (1, 1)), (parent, (1, 0)), (base, (0, 0)), ((base + adapter) / 2, (0.5, 0.5)),
    ):  # fmt: skip
        shift = np.random.default_rng(5).normal(0.1, 0.15, PLACES)  # of a replica with another precision
        figures = compare((measured + shift).tolist(), (base + shift).tolist(), probe)
        assert (figures.parent_slope, figures.adapter_slope) == pytest.approx(slopes, abs=0.15)
        assert figures.passed is (slopes == (1, 1))
        assert not figures.indistinct


def test_a_slope_is_not_drawn_to_zero_by_noise() -> None:
    """A regression on one recording gives 0.67 where the noise of a difference is as large as the difference."""
    slopes = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        true = random.laplace(0, 0.05, PLACES)
        first, second = (true + random.normal(0, 0.05, PLACES) for _ in range(2))
        zero = [0.0] * PLACES
        probe = PROBE.model_copy(
            update={
                "first": Recording(adapter=first.tolist(), base=zero),
                "second": Recording(adapter=second.tolist(), base=zero),
            }
        )
        slopes.append(compare(true.tolist(), zero, probe).adapter_slope)
    assert np.mean(slopes) == pytest.approx(1, abs=0.04)


def test_too_few_tokens_and_versions_that_do_not_differ_tell_nothing() -> None:
    versions, probe = logprobs(0.0, parent=False)
    adapter, base = versions["adapter"].tolist(), versions["base"].tolist()
    few = compare(adapter[:63], base[:63], probe)
    assert (few.passed, few.indistinct, few.tokens_needed) == (False, True, 64)
    same = Recording(adapter=base, base=base)
    figures = compare(base, base, probe.model_copy(update={"first": same, "second": same}))
    assert (figures.passed, figures.indistinct, figures.tokens_needed) == (False, True, None)


@for_each("value", [math.nan, math.inf, -math.inf])
def test_figures_that_are_no_numbers_never_pass(value: float) -> None:
    versions, probe = logprobs(0.0)
    adapter, base = versions["adapter"].tolist(), versions["base"].tolist()
    for measured, of_base in (([value, *adapter[1:]], base), (adapter, [*base[1:], value]), ([value] * PLACES,) * 2):
        figures = compare(measured, of_base, probe)
        assert (figures.passed, figures.indistinct) == (False, False)


async def proven(probe: Probe, measured: np.ndarray, base: np.ndarray) -> tuple[int, str]:
    """How many tokens a replica with these log-probabilities was asked for, and what was wrong."""
    app = FakeVllm({BASE: base.tolist(), "agent@r0002": measured.tolist()})
    app.loaded["agent@r0002"] = "/r0002"
    with replica(app) as url:
        async with Replica(url, timeout_seconds=30) as client:
            try:
                figures = await prove(client, "agent@r0002", BASE, probe)
                assert figures.passed
                why = ""
            except ServeError as error:
                assert (error.condition == Condition.WRONG_WEIGHTS) is ("cannot distinguish" not in str(error))
                why = str(error)
    return app.calls.count("POST /v1/completions"), why


async def test_more_tokens_are_measured_until_the_error_is_small() -> None:
    versions, quiet = logprobs(0.001)
    assert await proven(quiet, versions["adapter"], versions["base"]) == (2 * 64, "")
    versions, loud = logprobs(0.06)
    requests, why = await proven(loud, versions["adapter"], versions["base"])
    assert (requests, why) == (2 * 128, "")


async def test_what_stays_indistinct_says_how_many_tokens_would_tell() -> None:
    versions, probe = logprobs(0.2)
    requests, why = await proven(probe, versions["adapter"], versions["base"])
    assert requests == 2 * PLACES
    assert "256 tokens of its probe cannot distinguish it from its parent and the base model" in why
    needed = int(why.partition("; about ")[2].partition(" such tokens would tell")[0])
    assert 256 < needed < 100_000


async def test_an_adapter_that_does_nothing_is_not_the_one_of_the_probe() -> None:
    """Its `lora_B` are zero: it answers as the base model, on a replica that is 0.08 nats off the round's."""
    versions, probe = logprobs(0.01, parent=False, difference=0.05)
    shifted = versions["base"] + np.random.default_rng(1).normal(0, 0.1, PLACES)
    _, why = await proven(probe, shifted, shifted)
    assert "it shows 0.00 of the adapter's recorded difference" in why
