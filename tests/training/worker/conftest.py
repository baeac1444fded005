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
