"""A state, a judge, an embedding model and a configuration of them, for tests of filtering; a server for rounds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, parse
from flywheel.serving.environment_variables import SETTINGS_VARIABLE, ServerSettings
from flywheel.store.kernel.database import Store
from tests.cli.conftest import flywheel
from tests.daemon.filter_bench import RUBRIC, Make
from tests.factories.embedding_server import EmbeddingServer
from tests.factories.fleet import Fleet, config_of
from tests.factories.judge_server import JudgeServer
from tests.factories.round import put_trained
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, replica

__all__ = ["flywheel"]


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(lambda question, answer: "WRONG" not in answer) as server:
        yield server


@pytest.fixture
def embeddings() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


@pytest.fixture
def make(tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (tmp_path / "rubric.yaml").write_text(yaml.safe_dump(RUBRIC))

    def config(*filters: dict[str, Any], rubric: bool = True, **values: Any) -> Config:
        keys = {"keep_order"} & set(values)
        chain = {"id": "c", "filters": list(filters), **{key: values.pop(key) for key in keys}}
        (tmp_path / "chain.yaml").write_text(yaml.safe_dump(chain))
        raw = {
            "state": {"dir": "state"},
            "filter": {"chain": "chain.yaml", **({"rubric": "rubric.yaml"} if rubric else {})},
            "judge": {"base_url": judge.base_url, "model": "j", "max_attempts": 1, "retry_undecided_seconds": 0},
            **values,
        }
        return parse(raw, "the test's configuration", tmp_path)

    return config


@pytest.fixture
def server() -> Iterator[tuple[FakeVllm, str]]:
    app = FakeVllm({BASE: PROBE.second.base})
    with replica(app) as url:
        yield app, url


@pytest.fixture
async def fleet(tmp_path: Path, store: Store) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        apps = [FakeVllm({BASE: PROBE.second.base}) for _ in range(2)]
        urls = [stack.enter_context(replica(app)) for app in apps]
        for number in (1, 2, 3):
            await store.write(put_trained, number, tmp_path / f"r{number:04d}", *apps)
        yield Fleet(store, config_of(tmp_path, *urls), apps, tmp_path)


@pytest.fixture
def two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requested before `fleet`, whose servers read it."""
    monkeypatch.setenv(SETTINGS_VARIABLE, ServerSettings(max_adapters=2).as_json())
