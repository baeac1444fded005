"""What rounds of this folder share: a judge, and the removal of their temporary directories."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from flywheel.cli.demo import judge
from tests.factories import worker


@pytest.fixture(scope="package", autouse=True)
def _temporary_directories() -> Iterator[None]:
    yield
    for path in worker.MADE:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="package")
def judge_url() -> Iterator[str]:
    with judge.running() as url:
        yield url


@pytest.fixture(scope="package")
def trained(judge_url: str, tmp_path_factory: pytest.TempPathFactory) -> worker.Done:
    """A plain round of GRPO on the base model, run once for all tests that read what it left."""
    planned = worker.spec(judge_url, left_out={"t-planned": "no result of its calls is recorded"})
    # So that its adapter answers otherwise than the base model.
    planned.settings["training"]["learning_rate"] = 1e-2
    return worker.run(tmp_path_factory.mktemp("first") / "r0001", planned)
