"""The judge is not the trained model, however its address is spelled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.file import Config, parse
from flywheel.daemon.judging.judge_setup import check_independence, server_address
from flywheel.errors import ConfigError
from flywheel.judge.rubric.rubric import Rubric


def config(judge: dict[str, Any], urls: tuple[str, ...] = ("http://127.0.0.1:8000",)) -> Config:
    raw = {
        "model": {"base": "Org/Base-7B", "alias": "my-agent"},
        "serving": {"urls": list(urls)},
        "judge": {"base_url": "http://127.0.0.1:8000/v1", **judge},
    }
    return parse(raw, "the test's configuration", Path())


@pytest.mark.parametrize("model", ["Org/Base-7B", "Org/Base-7B/", "Base-7B", "my-agent", "my-agent@r0003"])
@pytest.mark.parametrize(
    ("judge", "served"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1/", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/v1", "http://localhost:8000/"),
        ("http://0.0.0.0:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.1.1:8000", "http://localhost:8000"),
        ("http://[::ffff:127.0.0.1]:8000/v1", "http://localhost:8000"),
        ("http://GPU1.example.:80/v1", "http://gpu1.example"),
        ("https://gpu1.example/llm/v1", "https://gpu1.example:443/llm/"),
    ],
)
def test_the_trained_model_at_its_own_server_is_refused(model: str, judge: str, served: str) -> None:
    given_config = {"base_url": judge, "model": model}
    with pytest.raises(ConfigError, match=r"judge\.allow_self"):
        check_independence(config(given_config, ("http://elsewhere:1", served)))
    check_independence(config({**given_config, "allow_self": True}, (served,)))


def test_the_alias_is_refused_wherever_it_is_asked_for() -> None:
    with pytest.raises(ConfigError):
        check_independence(config({"base_url": "http://proxy.example/v1", "model": "my-agent@r0001"}))


@pytest.mark.parametrize(
    ("judge", "warning"),
    [
        ({"base_url": "http://127.0.0.1:8001/v1", "model": "Org/Base-7B"}, "the base of the trained model"),
        ({"model": "Other/Judge"}, "at the trained model's own server"),
        ({"base_url": "http://127.0.0.1:8001/v1", "model": "Other/Judge"}, ""),
        ({"base_url": "https://127.0.0.1:8000/v1", "model": "my-agent-2"}, "own server"),
    ],
)
def test_what_may_be_somebody_else_is_warned_of(
    judge: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_independence(config(judge))
    assert (warning in caplog.text) if warning else not caplog.text


def test_a_backup_and_a_rubric_s_judge_are_checked_too() -> None:
    other = {"base_url": "https://api.example/v1", "model": "other"}
    with pytest.raises(ConfigError, match=r"judge\.backup\.model"):
        check_independence(config({**other, "backup": {"base_url": "http://localhost:8000/v1", "model": "Base-7B"}}))
    rubric = Rubric.model_validate({"id": "r", "custom_rubrics": "x", "judge": {"model": "my-agent"}})
    with pytest.raises(ConfigError):
        check_independence(config(other), rubric)


def test_the_endpoint_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    with pytest.raises(ConfigError):
        check_independence(config({"base_url": None, "model": "Base-7B"}))


@given(st.text())
def test_any_text_leads_somewhere(url: str) -> None:
    server_address(url)
