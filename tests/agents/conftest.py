"""A server of agents that records their calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.scripted_model import Recorder, ScriptedModel
from tests.factories.recording_server import Server
from tests.serving.fake_vllm import running, with_middleware


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = ScriptedModel()
    log = {"path": str(tmp_path / "serving" / "calls.db"), "keep_days": 1, "max_bytes": 10**9}
    app = with_middleware(model, FLYWHEEL_ALIAS="my-agent", call_log=log)
    recorder = Recorder(app)
    with running(recorder) as url:
        yield Server(model, recorder, url)
