"""A state with judged tasks and a server, for tests of rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.daemon.deployer import Deployer
from flywheel.daemon.rounds.rounds import Rounds
from flywheel.judge.rubric.file import load_rubric
from flywheel.store.kernel.database import Store
from tests.factories.config import BOXED_RUBRIC, make_config
from tests.factories.verdict import put_tasks
from tests.factories.wheel import Wheel, manual
from tests.serving.fake_vllm import BASE, FakeVllm


@pytest.fixture
async def wheel(tmp_path: Path, store: Store, server: tuple[FakeVllm, str]) -> Wheel:
    app, url = server
    config = make_config(
        tmp_path,
        model={"base": BASE, "alias": "agent"},
        serving={"urls": [url], "drain_seconds": 0},
        trigger={"min_samples": 4, "min_held_out": 2, "cron_min_samples": 1},
        gate={"min_tasks": 2, "min_power": 0},
        daemon={"round_attempts": 1},
    )
    await store.write(put_tasks, 6, 4)
    deployer = Deployer(store, config)
    return Wheel(store, config, app, Rounds(store, config, load_rubric(BOXED_RUBRIC), deployer), deployer)


@pytest.fixture
async def by_hand(wheel: Wheel) -> Rounds:
    """The rounds of `wheel`, each of whose candidates waits for a person."""
    return wheel.others(manual(wheel))
