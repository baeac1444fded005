"""One Ray session for all tests of this package. Each module ends its own actors."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from flywheel.config import Config
from flywheel.training.data.rollout import LoadedAdapter


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


@pytest.fixture(scope="module")
def adapters(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> list[LoadedAdapter]:
    """Two adapters, loaded as candidate and deployed would be."""
    from tests.factories.engine import strange_adapter

    folder = tmp_path_factory.mktemp("adapters")
    loaded = [strange_adapter(engine, number, folder / f"a{number}") for number in (21, 22)]
    # What was sent is with the engine.
    shutil.rmtree(folder)
    return loaded
