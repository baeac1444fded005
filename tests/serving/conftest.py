"""A scripted vLLM behind the real middleware."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.fake_vllm import FakeVllm, replica


@pytest.fixture
def app() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def url(app: FakeVllm) -> Iterator[str]:
    with replica(app) as url:
        yield url
