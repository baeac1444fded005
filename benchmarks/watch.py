"""How often the watch of a promotion rolls back what is as good, and what is worse by ten points: `python -m
benchmarks.watch`.

Units arrive one after the other and get an arm at random; `deploy.watch` has its defaults, so that a watch ends after
1,000 outcomes. `false_rollback` is the share of watches of a version that is as good that roll it back, `power_10` of
one that is ten points worse: the worst of all scenes, which are below `scenes`. Scenes differ in the success rate of
the old version (0.5 to 0.95), and in `drift`: both rates fall by 0.3 within the watch; `clusters`: eight units in a
row are of one user, and users differ (beta distribution, half of the variance); `late`: verdicts arrive in another
order, on average after 200 further units; `missing`: every fifth unit has no outcome.

`power_10_alone` is `power_10` if all false alarms were those of the test on outcomes: what that on missing outcomes
costs. `absent_10` is how often a version is rolled back that is as good and loses ten points more of its outcomes.

`delay`: without an end, the median number of units until a version that is ten points worse (0.8 → 0.7) is rolled
back, and how many of them it answered, by the share of the new version. `noticed`: how often a loss of the size that
`status` then calls noticeable was shown after so many units.

The test is the daemon's.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

from benchmarks import measurement
from flywheel.config.deploy import WatchSettings
from flywheel.training.gate.sequential_test import WatchTest, detectable_loss

LOSS: Final = 0.1
DRIFT: Final = 0.3
CLUSTER: Final = 8
LATE: Final = 200.0
MISSING: Final = 0.2
RATES: Final = (0.5, 0.65, 0.8, 0.95)
ENDLESS: Final = 6000
ALONE: Final = 20.0
"""The limit of a single test."""


@dataclass(frozen=True)
class Scene:
    """How units fare. `rate` is the success rate of the old version."""

    rate: float
    drift: bool = False
    clusters: bool = False
    late: bool = False
    missing: bool = False

    @property
    def name(self) -> str:
        return ", ".join([f"rate {self.rate:g}", *(key for key, value in asdict(self).items() if value is True)])


SCENES: Final = [
    Scene(rate, **{kind: True} if kind else {})
    for rate in RATES
    for kind in ("", "drift", "clusters", "late", "missing")
]


def outcomes(
    scene: Scene, share: float, loss: float, count: int, rng: random.Random, absence: float = 0.0
) -> Iterator[tuple[bool, bool | None]]:
    """Arm (whether the new version's) and success of so many units, None for a missing outcome, in the order in which
    outcomes become known. `absence` is the share of outcomes that only the new version loses."""
    known: list[tuple[float, bool, bool | None]] = []
    user = 0.0
    for place in range(count):
        is_new = rng.random() < share
        base = scene.rate - (DRIFT * place / count if scene.drift else 0.0)
        if scene.clusters and place % CLUSTER == 0:
            user = rng.betavariate(base, 1 - base) - base
        chance = base + user - (loss if is_new else 0.0)
        success: bool | None = rng.random() < chance
        if rng.random() < (MISSING if scene.missing else 0.0) + (absence if is_new else 0.0):
            success = None
        known.append((place + (rng.expovariate(1 / LATE) if scene.late else 0.0), is_new, success))
    known.sort(key=lambda each: each[0])
    yield from ((is_new, success) for _, is_new, success in known)


def units_to_rollback(scene: Scene, share: float, loss: float, count: int, seed: int) -> tuple[int, int] | None:
    """After how many units the new version is rolled back, and how many of them are its own; None if it is not."""
    test = WatchTest(share)
    for is_new, success in outcomes(scene, share, loss, count, random.Random(seed)):
        test.add(is_new=is_new, success=success)
        if test.shows_harm:
            return sum(test.presence.units), test.presence.units[1]
    return None


def found(scene: Scene, share: float, loss: float, count: int, seed: int, absence: float) -> tuple[bool, bool]:
    """Whether the new version is rolled back, and whether it would be if all false alarms, one in twenty, were those
    of the test on outcomes."""
    test = WatchTest(share)
    for is_new, success in outcomes(scene, share, loss, count, random.Random(seed), absence):
        test.add(is_new=is_new, success=success)
    return test.shows_harm, test.quality.log_most >= math.log(ALONE)


def main() -> None:
    parser = measurement.parser("watch", __doc__)
    parser.add_argument("--watches", type=int, default=1000, metavar="N", help="simulated watches of each kind")
    options = parser.parse_args()
    before = measurement.machine()
    settings, seeds = WatchSettings(), range(10 if options.quick else options.watches)
    scenes = [Scene(0.8)] if options.quick else SCENES
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:

        def stopped(share: float) -> list[tuple[int, int]]:
            watch = partial(units_to_rollback, Scene(0.8), share, LOSS, ENDLESS)
            return [each for each in pool.map(watch, seeds, chunksize=25) if each is not None]

        def frequencies(
            scene: Scene, loss: float, count: int, share: float = settings.new_share, absence: float = 0.0
        ) -> tuple[float, float]:
            watch = partial(found, scene, share, loss, count, absence=absence)
            both, alone = zip(*pool.map(watch, seeds, chunksize=25), strict=True)
            return round(sum(both) / len(seeds), 3), round(sum(alone) / len(seeds), 3)

        by_scene = {}
        for scene in scenes:
            power, alone = frequencies(scene, LOSS, settings.until_units)
            by_scene[scene.name] = {
                "false_rollback": frequencies(scene, 0.0, settings.until_units)[0],
                "power_10": power,
                "power_10_alone": alone,
                "absent_10": frequencies(scene, 0.0, settings.until_units, absence=LOSS)[0],
            }
        delay: dict[str, dict[str, Any]] = {}
        for share in (0.9, 0.5, 0.1):
            ended = stopped(share)
            delay[f"{share:g}"] = {
                "units": median(units for units, _ in ended),
                "of_the_worse": median(own for _, own in ended),
                "rolled_back": round(len(ended) / len(seeds), 3),
                "false_rollback": frequencies(Scene(0.8), 0.0, ENDLESS, share)[0],
            }
        noticed = {}
        for units in (100, 300, 600, 1000):
            loss = detectable_loss(units, settings.new_share, 0.8)
            if loss is not None:
                noticed[str(units)] = {"loss": round(loss, 3), "shown": frequencies(Scene(0.8), loss, units)[0]}
    result = {
        "watches": len(seeds),
        "false_rollback": max(each["false_rollback"] for each in by_scene.values()),
        "power_10": min(each["power_10"] for each in by_scene.values()),
        "power_10_alone": min(each["power_10_alone"] for each in by_scene.values()),
        "absent_10": min(each["absent_10"] for each in by_scene.values()),
        "delay": delay,
        "noticed": noticed,
        "scenes": by_scene,
    }
    measurement.report(result, before, as_json=options.json)


if __name__ == "__main__":
    main()
