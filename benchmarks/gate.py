"""How often the gate promotes what brings nothing, and what is better by ten points: `python -m benchmarks.gate`.

`false_promotion_20`: the share of sequences of twenty rounds on the same 50 held-out conversations, none of which
brings anything, that promote at least one candidate. `false_promotion_20_clustered`: the same with 25 conversations
of 8 tasks each that fare alike. `false_promotion_20_growing`: conversations come between rounds, 5, 25 or 50 each
time; the worst of the three. With 5 there is one epoch, with 50 every round begins one. All rounds run, also those
that would not start for lack of power. `power_10_points`: how often a candidate that is better by ten points is
promoted in the first test, by the number of tasks. `tripwire_cost`: by how much the tripwires lower that, for an
honest candidate, which is as often cut, fails as many calls and writes half as much again; `tripwires_block`: how
often they stop a candidate that is better by ten points and has one harm, with 100 tasks. `undecided`: with a share
of the answers of both sides undecided at random, `false_promotion_20` and `power_10_points` with 50 tasks.
`undecided_losses`: how often a candidate is promoted that is better by ten points, but for a share of 200 tasks, to
which the deployed adapter's answers are right and the candidate's are undecided.

Comparison, gate, error budget and settings are those of the program. Scores are 0 and 1, the hardest kind. The
chance that an answer to a task is right is drawn from a beta distribution with mean 0.6, of which half of the
variance lies between tasks. A better candidate has mean 0.7; a task keeps its rank. Answers of both sides are
independent otherwise: what common seeds add is not counted. Where conversations fare alike, each side has its own
luck with each of them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool
from typing import Any, Final

import numpy as np
from scipy import stats

from benchmarks import measurement
from flywheel.config.training import GateSettings
from flywheel.records.round import Comparison, CriterionComparison, GateTest, SpentTest
from flywheel.training.gate.gate import GAIN, TRIPWIRES, decide, following_test
from flywheel.training.gate.intervals import Paired, compare, compare_criterion

ROUNDS: Final = 20
TASKS: Final = (50, 100, 200)
MEAN: Final = 0.6
BETWEEN: Final = 1.0
"""Both parameters of the beta distribution together: at 1 half of the variance lies between tasks."""


@dataclass(frozen=True)
class Traffic:
    """How many held-out conversations there are at the first round, how many come after each one, and of how many
    tasks a conversation is. With `alike`, its tasks fare alike under an adapter. So many of all answers are
    `undecided`. To a share of the conversations, `lost`, the deployed adapter is right, and the candidate's answers
    are undecided."""

    conversations: int
    after_each: int = 0
    tasks: int = 1
    alike: bool = False
    undecided: float = 0.0
    lost: float = 0.0


def promotes_one(traffic: Traffic, gate: GateSettings, seed: int, rounds: int = ROUNDS) -> bool:
    """Whether one of so many rounds that bring nothing is promoted."""
    random = np.random.default_rng(seed)
    last: SpentTest | None = None
    asked, never_tested = 0, traffic.conversations
    for _ in range(rounds):
        test = following_test(gate.alpha, last, never_tested)
        asked = 0 if test.number == 1 else asked
        more = min(never_tested, gate.max_tasks // traffic.tasks - asked)
        asked += more
        found = compared(traffic, asked, gate, test, random)
        if decide(found, gate).promote:
            return True
        last = SpentTest(
            epoch=test.epoch,
            number=test.number,
            conversations=found.conversations,
            spread=found.spread,
            samples=found.samples,
        )
        never_tested += traffic.after_each - more
    return False


def promotes(traffic: Traffic, gate: GateSettings, gain: float, seed: int) -> bool:
    """Whether the first test promotes a candidate that is better by `gain`."""
    test, random = following_test(gate.alpha, None, traffic.conversations), np.random.default_rng(seed)
    return decide(compared(traffic, traffic.conversations, gate, test, random, gain=gain), gate).promote


def shows_ten_points(gate: GateSettings, tasks: int, seed: int, harm: str | None = "") -> bool:
    """Whether the first test promotes a candidate that is better by ten points: an honest one, one that does the
    named `harm`, or with None one of which the tripwires measured nothing."""
    test, random = following_test(gate.alpha, None, tasks), np.random.default_rng(seed)
    found = compared(Traffic(tasks), tasks, gate, test, random, gain=GAIN)
    if harm is not None:
        wires = [measured(name, tasks, gate, harm=name == harm, random=random) for name in TRIPWIRES]
        found = found.model_copy(update={"tripwires": wires})
    return decide(found, gate).promote


BAD: Final = {"cut": 0.03, "failed_calls": 0.1, "invalid_format": 0.05}
"""How much of the answers is bad on both sides."""
MORE: Final = 0.2
"""How much more of them a harmful candidate makes bad."""
RATIO, HARMFUL_RATIO = 1.5, 3.0
"""Of the lengths. They vary by a factor of e^0.5 between answers to the same task."""


def measured(
    name: str, tasks: int, gate: GateSettings, *, harm: bool, random: np.random.Generator
) -> CriterionComparison:
    """What the program makes of a measure of the tripwires. One task is one conversation."""
    shape = (tasks, gate.samples_for(tasks))
    if name in BAD:
        luck = random.random((tasks, 1))
        sides = [random.random(shape) >= _chances(luck, BAD[name] + more) for more in (MORE * harm, 0.0)]
    else:
        ratio = HARMFUL_RATIO if harm else RATIO
        ours, theirs = random.lognormal(0, 0.5, (2, *shape)).mean(axis=2)
        times = ratio * ours / theirs if name == "longer" else theirs / (ours / ratio)
        sides = [times[:, None] <= 2, np.ones((tasks, 1), bool)]
    candidate, deployed = (side.astype(float).tolist() for side in sides)
    pairs = [Paired(f"t-{n}", tuple(candidate[n]), tuple(deployed[n]), f"c-{n}") for n in range(tasks)]
    seed = int(random.integers(2**31))
    return compare_criterion(name, pairs, takes_away=False, confidence=gate.confidence, seed=seed)


def compared(
    traffic: Traffic,
    conversations: int,
    gate: GateSettings,
    test: GateTest,
    random: np.random.Generator,
    gain: float = 0.0,
) -> Comparison:
    """What the program makes of the answers of both sides."""
    samples = gate.samples_for(conversations * traffic.tasks)
    shape = (conversations, 1 if traffic.alike else traffic.tasks)
    luck = random.random((2, *shape)) if traffic.alike else np.tile(random.random(shape), (2, 1, 1))
    chances = np.stack([_chances(luck[0], MEAN + gain), _chances(luck[1], MEAN)])
    # (2, conversations, tasks, samples)
    right = random.random((2, conversations, traffic.tasks, samples)) < chances[..., None]
    scores = right.astype(float)
    if traffic.undecided or traffic.lost:
        undecided = random.random(right.shape) < traffic.undecided
        lost = random.random(conversations) < traffic.lost
        undecided[0, lost], scores[1, lost] = True, 1.0
        scores = np.where(undecided, None, scores)
    candidate, deployed = scores.tolist()
    tasks = [
        Paired(f"t-{place}-{number}", tuple(of_candidate), tuple(of_deployed), f"c-{place}")
        for place in range(conversations)
        for number, (of_candidate, of_deployed) in enumerate(zip(candidate[place], deployed[place], strict=True))
    ]
    seed = int(random.integers(2**31))
    return compare(tasks, samples=samples, alpha=test.alpha, needed=gate.min_gain, seed=seed)


def _chances(luck: np.ndarray, mean: float) -> np.ndarray:
    chances: np.ndarray = stats.beta.ppf(luck, BETWEEN * mean, BETWEEN * (1 - mean))
    return chances


def share(pool: Pool, happens: Callable[[int], bool], times: int) -> float:
    """How often something happens, of so many times with different seeds."""
    return round(sum(pool.imap_unordered(happens, range(times), chunksize=20)) / times, 4)


def main() -> None:
    options = measurement.parser("gate", __doc__).parse_args()
    before = measurement.machine()
    gate = GateSettings()
    sequences, times = (10, 10) if options.quick else (1000, 1000)
    clustered = Traffic(25, tasks=8, alike=True)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        growing = {
            str(after_each): share(pool, partial(promotes_one, Traffic(50, after_each), gate), sequences)
            for after_each in (5, 25, 50)
        }
        power, without = (
            {str(tasks): share(pool, partial(shows_ten_points, gate, tasks, harm=harm), times) for tasks in TASKS}
            for harm in ("", None)
        )
        result: dict[str, Any] = {
            "false_promotion_20": share(pool, partial(promotes_one, Traffic(50), gate), sequences),
            "false_promotion_20_clustered": share(pool, partial(promotes_one, clustered, gate), sequences),
            "false_promotion_20_growing": max(growing.values()),
            "growing_by_conversations_after_each": growing,
            "power_10_points": power,
            "tripwire_cost": {tasks: round(without[tasks] - power[tasks], 4) for tasks in power},
            "tripwires_block": {
                name: round(1 - share(pool, partial(shows_ten_points, gate, 100, harm=name), times), 4)
                for name in TRIPWIRES
            },
            "undecided": {
                str(part): {
                    "false_promotion_20": share(
                        pool, partial(promotes_one, Traffic(50, undecided=part), gate), sequences
                    ),
                    "power_10_points": share(pool, partial(promotes, Traffic(50, undecided=part), gate, GAIN), times),
                }
                for part in (0.0, 0.05, 0.2)
            },
            "undecided_losses": {
                str(part): share(pool, partial(promotes, Traffic(200, lost=part), gate, GAIN), times)
                for part in (0.1, 0.4)
            },
            "sequences": sequences,
        }
    measurement.report(result, before, as_json=options.json)


if __name__ == "__main__":
    main()
