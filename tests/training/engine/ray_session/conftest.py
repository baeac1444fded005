"""One Ray session for all tests of this package. Modules whose engines have equal settings share one.

Each module ends its other actors.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from flywheel.config.file import Config
from flywheel.training.data.rollout import LoadedAdapter
from tests.factories.round import POLICY

if TYPE_CHECKING:
    # It needs packages for training.
    from flywheel.training.engine.engine import EngineSettings


@pytest.fixture(scope="package", autouse=True)
def ray_session() -> Iterator[None]:
    """A round's, of two CPUs: two actors live at a time. It leaves no process and ends no earlier one."""
    from flywheel.training.engine import ray_cluster

    with subprocess.Popen(["sleep", "infinity"]) as earlier:
        try:
            before = {process.pid for process in psutil.Process().children(recursive=True)}
            with ray_cluster.session(Config()):
                yield
            left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            assert left == []
            assert earlier.poll() is None
        finally:
            earlier.kill()


class SharedEngine:
    """The engine of the module that runs. It stays for the next one, if that asks for equal settings."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._settings: EngineSettings | None = None

    def of(self, settings: EngineSettings) -> Any:
        """The engine with these settings. Another one is ended first: the session has two CPUs."""
        from flywheel.training.engine import ray_cluster
        from flywheel.training.engine.engine import Engine
        from tests.factories.engine import share_of_an_engine

        if settings != self._settings:
            self.end()
            self._actor = ray_cluster.start(Engine, settings, gpus=share_of_an_engine())
            # Keys in the environment of a round are for its own servers.
            keys = {"JUDGE_API_KEY": "secret-of-the-judge", "VLLM_API_KEY": "secret"}
            ray_cluster.wait([self._actor.join.remote(keys, settings.model, [], "")])
            [about] = ray_cluster.wait([self._actor.start.remote()])
            # The server's, which is the model's own, although rollouts to learn from need less.
            assert about.context == 2048
            self._settings = settings
        return self._actor

    def end(self) -> None:
        import ray

        from flywheel.training.engine import ray_cluster

        if self._settings is not None:
            ray_cluster.stop([self._actor])
            ray.kill(self._actor)
        self._settings = None


@pytest.fixture(scope="package")
def shared_engine(ray_session: None) -> Iterator[SharedEngine]:
    shared = SharedEngine()
    yield shared
    shared.end()


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy, with defaults of sampling that no round may learn from."""
    folder = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(POLICY, folder)
    told = json.loads((folder / "generation_config.json").read_text())
    defaults = {
        "temperature": 0.2, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "repetition_penalty": 3.0, "max_new_tokens": 5,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps({**told, **defaults}))
    return folder


@pytest.fixture(scope="package")
def calling_settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """Of an engine whose policy calls a tool where it has one."""
    from tests.factories.engine import settings
    from tests.training.optim import calling_policy

    chat = calling_policy.arguments(tmp_path_factory.mktemp("chat"))
    server = ("--enable-auto-tool-choice", "--tool-call-parser", "first-message", *chat)
    return replace(settings(str(POLICY)), server=server, more_adapters=1)


@pytest.fixture(scope="module")
def adapters(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LoadedAdapter]]:
    """Two adapters, loaded as candidate and deployed would be."""
    from flywheel.training.engine import ray_cluster
    from tests.factories.engine import strange_adapter

    folder = tmp_path_factory.mktemp("adapters")
    loaded = [strange_adapter(engine, number, folder / f"a{number}") for number in (21, 22)]
    # What was sent is with the engine.
    shutil.rmtree(folder)
    yield loaded
    ray_cluster.wait([engine.unload.remote(adapter) for adapter in loaded])
