"""A judge of which many calls fail in one way or another: nearly every task is decided all the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flywheel.system import http_client
from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.factories.judge_server import JudgeServer

TASKS, FAILING = 81, 0.4
WAYS = (
    "429", "500", "reset", "truncated body", "html", "error object", "cut off stream", "odd", "nonsense",
    "ignoring, nonsense", "truncated verdict", "missing criterion", "unknown choice", "empty choices",
    "empty content", "refusal", "cut off",
)  # fmt: skip


def flaky(seed: int) -> list[str]:
    """More behaviours than any run needs."""
    rng = random.Random(seed)
    return [rng.choice(WAYS) if rng.random() < FAILING else "good" for _ in range(20 * TASKS)]


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "retry_delay", lambda *_: 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 4])
def test_a_judge_that_fails_often_leaves_few_undecided(
    flywheel: Run, tmp_path: Path, no_waits: None, threads: int
) -> None:
    with JudgeServer(behaviour=flaky(seed=5)) as judge:
        bench = Bench(flywheel, tmp_path, judge)
        bench.settings = {"max_thread": threads}
        bench.lines(*["good: \\boxed{1}"] * TASKS)
        ran = bench("filter", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["judged"] == TASKS
    assert ran.json["undecided"] <= 0.05 * TASKS
