"""Graders that retry at once and are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from flywheel.config.judge import JudgeSettings
from flywheel.judge.chat_completions import EndpointCapabilities
from flywheel.judge.client import JudgeClient, settings_for
from flywheel.judge.grader import Grader
from flywheel.judge.rubric.rubric import Rubric
from flywheel.records.verdict import Exchange
from flywheel.system import http_client
from tests.factories.judge_server import JudgeServer

GOOD = Exchange("What is 3 plus 4?", "\\boxed{7}")
Make = Callable[..., Grader]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a grader for a judge, by the test file's RUBRIC if no other is named. Other arguments are settings."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    monkeypatch.setattr(http_client, "retry_delay", lambda *_: 0.0)

    def make(
        judge: JudgeServer,
        rubric: Rubric | None = None,
        capabilities: EndpointCapabilities | None = None,
        **more: Any,
    ) -> Grader:
        rubric = rubric or request.module.RUBRIC
        settings = JudgeSettings(**{"model": "the-judge", "base_url": judge.base_url, "max_attempts": 3, **more})
        client = JudgeClient(settings_for(rubric, settings), capabilities or EndpointCapabilities())
        return open_graders.enter_context(closing(Grader(rubric, settings, client)))

    with ExitStack() as open_graders:
        yield make
