"""How often the proof of weights errs: `python -m benchmarks.weights`.

Draws of the log-probabilities that a round records and a replica shows. Versions differ at each token by a draw from
a Laplace distribution with the mean size `difference`, the parent from the base model as well as the adapter from its
parent. Each measurement has `own` noise; what a replica does to adapter and base model alike has `common` noise (both
normal; standard deviations in nats per token, that of the common noise is drawn up to
0.15). The places are chosen, and the result is computed, by the program.

`wrong_passed`: the draws of wrong weights that passed, of `draws` in each of the cells of noises and differences, by
kind. `right_failed`: the largest share of draws of the right weights that were refused or indistinct, over the cells
with a difference of so many times the own noise. `trained_on_passed` is about weights that were trained on from the
adapter and lie as far from it as it does from its parent: the slopes are right, and only residuals can show them.
In `uneven`, tokens differ in how certain they are, and differences and noise with them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from benchmarks import measurement
from flywheel.records.round import Probe, Recording
from flywheel.serving.client import weight_verification
from flywheel.serving.client.weight_verification import compare
from flywheel.training.optim.probe_measurement import PROMPTS, TOKENS, most_telling

NOISES: Final = (0.005, 0.01, 0.02, 0.05)
DIFFERENCES: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
LARGEST_COMMON: Final = 0.15
RATIOS: Final = (1, 1.5, 2, 4)
"""Differences in multiples of the own noise, by which results are grouped."""
RIGHT, TRAINED_ON = "right", "trained on"
WRONG: Final = ("zeroed", "base", "parent", "half", "another")


@dataclass(frozen=True)
class Cell:
    own: float
    difference: float
    parent: bool
    uneven: bool = False
    common: float = LARGEST_COMMON


def results(cell: Cell, seed: int) -> dict[str, str]:
    """What the program says about each kind of weights in one draw: passed, refused or indistinct."""
    random = np.random.default_rng(seed)
    tokens = PROMPTS * TOKENS
    # How uncertain the tokens are, 1 on average: most tokens of a text are nearly certain.
    scale = random.beta(0.5, 0.8, tokens) if cell.uneven else np.ones(tokens)
    scale /= scale.mean()

    def step() -> np.ndarray:
        return random.laplace(0, cell.difference, tokens) * scale

    def noisy(logprobs: np.ndarray) -> np.ndarray:
        return logprobs + random.normal(0, cell.own, tokens) * scale

    base = -random.exponential(1.0, tokens)
    parent = base + step() if cell.parent else base
    adapter = parent + step()
    weights = {
        RIGHT: adapter,
        "zeroed": base,
        "base": base,
        "half": (base + adapter) / 2,
        "another": parent + step(),
        TRAINED_ON: adapter + step(),
        **({"parent": parent} if cell.parent else {}),
    }
    versions = {"adapter": adapter, "base": base, **({"parent": parent} if cell.parent else {})}
    first, second = ({name: noisy(logprobs) for name, logprobs in versions.items()} for _ in range(2))
    order = most_telling(_recording(first, slice(None)))[: weight_verification.PLACES[-1]]
    probe = Probe.model_construct(first=_recording(first, order), second=_recording(second, order))
    found = {}
    for kind, logprobs in weights.items():
        common = random.normal(0, random.uniform(0, cell.common), tokens)
        measured, of_base = (noisy(each) + common for each in (logprobs, base))
        for number in weight_verification.PLACES:
            places = order[:number]
            figures = compare(measured[places].tolist(), of_base[places].tolist(), probe)
            if not figures.indistinct:
                break
        found[kind] = "indistinct" if figures.indistinct else "passed" if figures.passed else "refused"
    return found


def _recording(logprobs: dict[str, np.ndarray], places: Any) -> Recording:
    return Recording.model_construct(**{name: values[places].tolist() for name, values in logprobs.items()})


def counted(cell: Cell, draws: int) -> Counter[tuple[str, str]]:
    """How often the program said what about which kind of weights."""
    return Counter(pair for seed in range(draws) for pair in results(cell, seed).items())


def summary(cells: list[Cell], counts: list[Counter[tuple[str, str]]], draws: int) -> dict[str, Any]:
    wrong = {kind: sum(count[kind, "passed"] for count in counts) for kind in WRONG}
    failed: dict[str, float] = {}
    trained_on: dict[str, float] = {}
    for ratio in RATIOS:
        inside = [
            count
            for cell, count in zip(cells, counts, strict=True)
            if ratio <= cell.difference / cell.own * 1.0001 < min([r for r in RATIOS if r > ratio], default=np.inf)
        ]
        failed[f"{ratio:g}"] = max((draws - count[RIGHT, "passed"]) / draws for count in inside)
        trained_on[f"{ratio:g}"] = max(count[TRAINED_ON, "passed"] / draws for count in inside)
    return {"wrong_passed": wrong, "right_failed": failed, "trained_on_passed": trained_on}


def main() -> None:
    options = measurement.parser("weights", __doc__).parse_args()
    before = measurement.machine()
    draws = 20 if options.quick else 2000
    result: dict[str, Any] = {"draws": draws}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, uneven in (("even", False), ("uneven", True)):
            cells = [Cell(*values, uneven) for values in product(NOISES, DIFFERENCES, (False, True))]
            counts = pool.map(partial(counted, draws=draws), cells, chunksize=1)
            result[name] = {"cells": len(cells), **summary(cells, counts, draws)}
    measurement.report(result, before, as_json=options.json)


if __name__ == "__main__":
    main()
