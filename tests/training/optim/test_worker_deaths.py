"""A process of a trainer on a cluster is killed: the others end with it, and the attempt with the reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from flywheel.errors import TrainError
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.adapter_files import AdapterFiles
from tests.factories.policy_training import policy, rows
from tests.factories.trainer_processes import Processes, two_nodes
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.training,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_end_when_one_is_killed(tmp_path: Path, rank: int) -> None:
    """While rank 0 waits for rollouts, and rank 1 for rank 0. On a cluster, the end of the session ends them."""
    from flywheel.training.engine.policy import save_adapter

    save_adapter(policy(), tmp_path / "parent")
    parent = AdapterFiles.read(tmp_path / "parent")
    with two_nodes():
        processes = Processes(tmp_path / "two", 2, parent)
        pids = [pid for _, pid in processes.each("where")]
        killed, other = psutil.Process(pids[rank]), psutil.Process(pids[1 - rank])
        adapter = processes.prepare(steps=2)
        with ThreadPoolExecutor() as waiting:
            work = [rows(), rows()], adapter, "late: rows of step 2"
            attempt = waiting.submit(ray_cluster.on_all, processes.members, "reinforce", *work)
            wait_for((tmp_path / "two" / "late").exists, "the second step")
            killed.kill()
            why = attempt.exception(timeout=60)
        assert isinstance(why, TrainError)
        assert "a process of it died" in why.why
        assert why.retryable
        ray.shutdown()
        wait_for(lambda: not other.is_running(), "the end of the other process", seconds=60)
