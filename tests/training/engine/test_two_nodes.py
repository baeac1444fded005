"""A round's processes on a Ray cluster of two nodes, as `ray.address` has it. Their GPUs are only numbers."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.secrets import URL_USERS
from flywheel.training.engine import ray_cluster
from flywheel.training.engine.gpu_placement import place_on_gpus
from flywheel.training.engine.ray_cluster import RoundActor
from flywheel.training.engine.rollout_engine import ProgramSetup, RolloutEngine
from flywheel.training.program.agent_program import ModelEndpoint
from flywheel.training.program.program_pool import program_of
from tests.factories import cluster
from tests.factories.round import POLICY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
GPUS_PER_NODE = 4
AGENT = """\
from pathlib import Path
import sys; sys.modules["agentscope"] = None
async def run(task, model):
    return {"response": Path("words.txt").read_text()}
"""
"""Reads a file of its working directory."""


class Process(RoundActor):
    """Says where it is and what it knows."""

    def seat(self) -> tuple[str, tuple[str, ...]]:
        return ray.get_runtime_context().get_node_id(), tuple(map(str, ray.get_gpu_ids()))

    def knows(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def told_by_ray(self) -> str:
        return str(ray.get_runtime_context().runtime_env)


class Runs(RoundActor, RolloutEngine):
    """Runs the user's agent as an engine does, without a model."""

    async def run(self, settings: dict[str, Any]) -> tuple[str, str]:
        await self.use_program(settings, ProgramSetup({}, "", 0))
        assert self._pool is not None
        found = await self._pool.run({}, {"policy": ModelEndpoint("http://127.0.0.1:9/v1", "policy")}, "policy")
        await self.stop()
        return ray.get_runtime_context().get_node_id(), str(found.response)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the cluster, which was started before this process had its secrets."""
    with cluster.two_nodes(cpus=6, gpus=GPUS_PER_NODE) as address:
        yield address


@contextlib.contextmanager
def connected(address: str, **settings: Any) -> Iterator[Config]:
    ray_settings = {"address": address, "placement_seconds": 3, **settings.pop("ray", {})}
    config = Config.model_validate({"ray": ray_settings, **settings})
    with ray_cluster.session(config):
        yield config


@pytest.mark.extended
def test_secrets_and_environment_reach_every_process(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "MY_JUDGE_KEY",
        "MY_BACKUP_KEY",
        "OPENAI_BASE_URL",
        "HTTPS_PROXY",
        "HF_HOME",
        "VLLM_LOGGING_LEVEL",
    )
    for name in names:
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("MY_DIARY", "private")
    monkeypatch.setenv(URL_USERS, "{}")
    judge = {"api_key_env": "MY_JUDGE_KEY", "backup": {"api_key_env": "MY_BACKUP_KEY"}}
    with connected(address, judge=judge) as config:
        placement = place_on_gpus(8, ray_cluster.gpus(), trainers=1)
        places = ray_cluster.Places(placement, 60)
        members = [
            ray_cluster.start(Process, gpus=gpu_share.share, within=places.at(gpu_share))
            for gpu_share in (*placement.trainers, *placement.engines)
        ]
        ray_cluster.gather(members[:1], members[1:], config, str(POLICY))
        assert ray_cluster.wait([each.knows.remote(*names, URL_USERS, "MY_DIARY") for each in members]) == [
            [*(f"value of {name}" for name in names), "{}", None]
        ] * len(members)
        assert "value of" not in ray_cluster.wait([members[0].told_by_ray.remote()])[0], "a dashboard shows that"
        # Whole GPUs first: all eight of both nodes are used, one of them by two.
        taken = ray_cluster.wait([each.seat.remote() for each in members])
        assert all(len(gpu) == 1 for _, gpu in taken)
        assert len(set(taken)) == 2 * GPUS_PER_NODE
        assert len({node for node, _ in taken}) == 2
        assert taken[0] == taken[1], "the trainer and the engine that shares with it"


@pytest.mark.extended
def test_an_engine_of_several_gpus_has_them_on_one_node(address: str) -> None:
    with connected(address) as config:
        placement = place_on_gpus(3, ray_cluster.gpus(), trainers=1, tensor_parallel=2)
        places = ray_cluster.Places(placement, config.ray.placement_seconds)
        members = [
            ray_cluster.start(Process, gpus=gpu_share.share, within=places.at(gpu_share))
            for gpu_share in (*placement.engines, *placement.trainers)
        ]
        taken = ray_cluster.wait([each.seat.remote() for each in members])
        assert [len(gpus) for _, gpus in taken] == [2, 2, 2, 1]
        assert len({(node, gpu) for node, gpus in taken for gpu in gpus}) == 7, "no GPU is shared"


def test_what_has_no_room_is_told_with_what_was_asked_and_what_is_free(address: str) -> None:
    with connected(address) as config:
        held = ray_cluster.Places(place_on_gpus(4, GPUS_PER_NODE, trainers=0), 60)
        assert held is not None
        with pytest.raises(TrainError) as caught:
            ray_cluster.Places(place_on_gpus(5, ray_cluster.gpus(), trainers=0), config.ray.placement_seconds)
        assert caught.value.retryable
        assert "no room within 3 s. Asked for, each on one node: 5 × (1 GPU, 1 CPU)." in caught.value.why
        assert (
            "Free in all of the cluster: 4 GPU, 8 CPU. What its nodes have, free or not: 4 GPU, 6 CPU, 4 GPU, 6 CPU"
            in (caught.value.why)
        )
        # What could not be had is not held either.
        assert ray_cluster.Places(place_on_gpus(4, ray_cluster.gpus(), trainers=0), 60)


def test_what_a_node_lacks_is_named(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The node, which has it from here, does not try again and again to reach the hub.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    agent = tmp_path / "agent.py"
    with connected(address) as config:
        member = ray_cluster.start(Process, gpus=0)
        with pytest.raises(TrainError, match=f"it has no {agent}") as caught:
            ray_cluster.gather([member], [], config, str(POLICY), [str(tmp_path), str(agent)])
        assert "ray.working_dir" in caught.value.hint
        # Only engines run the agent.
        ray_cluster.gather([], [member], config, str(POLICY), [str(agent)])
        for base in (str(tmp_path / "model"), "nobody/no-model"):
            with pytest.raises(TrainError, match=f"base model {base}: .+") as caught:
                ray_cluster.gather([], [member], config, base)
            assert "by its name on the hub" in caught.value.hint
            assert not caught.value.retryable


@pytest.mark.extended
def test_the_folder_of_the_users_agent_is_sent_to_each_node(address: str, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "agent.py").write_text(AGENT)
    (folder / "words.txt").write_text("sent")
    agent = {"workflow": f"{folder}/inner/agent.py:run", "folder": str(folder)}
    settings = {"agent": agent, "workers": 1}
    with connected(address, ray={"working_dir": str(folder)}, rollout=settings) as config:
        placement = place_on_gpus(GPUS_PER_NODE + 1, ray_cluster.gpus(), trainers=0)
        places = ray_cluster.Places(placement, 60)
        members = [ray_cluster.start(Runs, gpus=each.share, within=places.at(each)) for each in placement.engines]
        program = program_of(config)
        assert program is not None
        # No node can read the folder itself.
        shutil.rmtree(folder)
        ray_cluster.gather(members, [], config, str(POLICY), program.files)
        ran = ray_cluster.wait([each.run.remote(config.model_dump(mode="json")) for each in members])
    assert len({node for node, _ in ran}) == 2
    assert {text for _, text in ran} == {"sent"}


def test_an_address_where_no_cluster_is_is_told() -> None:
    with pytest.raises(TrainError, match=r"reach the Ray cluster at 127\.0\.0\.1:1"), connected("127.0.0.1:1"):
        pass
