"""Secrets stay out of texts from outside and of other people's programs, whatever the texts do with them."""

from __future__ import annotations

import io
import json
import logging
import pickle
import sys
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from flywheel import secrets as known_secrets
from flywheel.config.file import Config, parse
from flywheel.daemon.rounds.worker_process import result_of
from flywheel.errors import JudgeError, TrainError
from flywheel.records.round import LOG_FILE
from flywheel.secrets import (
    REDACTED,
    URL_USERS,
    environment_without_secrets,
    masked_url,
    redact_secrets,
    register_secret,
    register_secret_variable,
    whole_url,
)
from flywheel.serving.client.replica_client import Replica
from flywheel.system import log
from flywheel.system.user_code import PythonProcess

KEY = 'sk-"of/a\\test'


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_secrets, "_values", set())
    monkeypatch.setattr(known_secrets, "_variables", set())
    monkeypatch.setenv(URL_USERS, "")


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "MY_APIKEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_variables_whose_names_say_so_hold_secrets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, KEY)
    assert redact_secrets(f"it said {KEY}!") == f"it said {REDACTED}!"
    assert name not in environment_without_secrets()


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "MONKEY", "KEYBOARD", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES"]
)
def test_others_do_not(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "/a/long/value")
    assert redact_secrets("/a/long/value") == "/a/long/value"
    assert environment_without_secrets()[name] == "/a/long/value"


@pytest.mark.parametrize(
    "raw",
    [
        {"judge": {"api_key_env": "OF_THE_JUDGE"}},
        {"judge": {"backup": {"model": "b", "api_key_env": "OF_THE_JUDGE"}}},
        {"serving": {"api_key_env": "OF_THE_JUDGE"}},
        {"sources": [{"type": "otlp", "token_env": "OF_THE_JUDGE"}]},
    ],
)
def test_variables_that_the_configuration_names_hold_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raw: dict[str, object]
) -> None:
    monkeypatch.setenv("OF_THE_JUDGE", f"first-key|{KEY}")
    assert redact_secrets(KEY) == KEY
    parse(raw, "test", tmp_path)
    assert redact_secrets(f"{KEY} first-key") == f"{REDACTED} {REDACTED}"
    assert "OF_THE_JUDGE" not in environment_without_secrets()


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("http://bob:s3cret-word@host:80/v1", "http://***@host:80/v1"),
        ("https://token-of-bob@host/v1?a=b@c", "https://***@host/v1?a=b@c"),
        ("http://bob:p@ss@host", "http://***@host"),
        ("http://host/v1", "http://host/v1"),
        ("http://host/a@b", "http://host/a@b"),
        ("http://***@host/v1", "http://***@host/v1"),
        ("", ""),
    ],
)
def test_names_and_passwords_in_urls_are_put_back_for_requests_alone(url: str, masked: str) -> None:
    assert masked_url(url) == masked
    assert masked_url(masked) == masked
    assert whole_url(masked) == url
    assert whole_url(url) == url


def test_another_name_at_the_same_host_is_another_mask() -> None:
    urls = [f"http://{user}:a-password@host/v1" for user in ("ann", "bob", "ann")]
    masked = [masked_url(url) for url in urls]
    assert masked == ["http://***@host/v1", "http://***2@host/v1", "http://***@host/v1"]
    assert [whole_url(url) for url in masked] == urls
    assert redact_secrets("it said a-password") == f"it said {REDACTED}"
    assert URL_USERS not in environment_without_secrets()


def test_each_url_of_the_configuration_is_masked(tmp_path: Path) -> None:
    url = "http://bob:s3cret-word@host:80/v1"
    raw = {
        "judge": {"base_url": url, "model": "m", "backup": {"base_url": url}},
        "rollout": {
            "agent": {"command": ["true"]},
            "auxiliary_models": {"user": {"base_url": url, "model": "m"}},
        },
        "notify": [{"url": url, "on": ["promoted"]}],
        "export": {"langfuse": {"host": url}},
        "deploy": {"web_url": url},
    }
    dumped = parse(raw, "test", tmp_path).model_dump_json()
    assert "s3cret-word" not in dumped and "bob" not in dumped
    assert dumped.count("http://***@host:80/v1") == 6
    assert Config.model_validate_json(dumped).judge.base_url == "http://***@host:80/v1", "as in a round's worker"


def test_a_secret_is_known_in_every_spelling_and_whole() -> None:
    register_secret(KEY)
    register_secret(KEY + "-and-more")
    assert redact_secrets(json.dumps({"said": KEY})) == json.dumps({"said": REDACTED})
    assert redact_secrets(f"http://host/?key={quote(KEY, safe='')}") == f"http://host/?key={REDACTED}"
    assert redact_secrets(f"{KEY}-and-more".encode()) == REDACTED.encode()


@pytest.mark.parametrize("nothing", ["", "none", "EMPTY", "x"])
def test_what_stands_for_no_key_hides_nothing(nothing: str) -> None:
    register_secret(nothing)
    assert redact_secrets(f"this is {nothing}.") == f"this is {nothing}."


def test_no_error_holds_a_secret() -> None:
    register_secret(KEY)
    error = JudgeError(f"ask {KEY}", f"it said {KEY}", f"Not {KEY}.")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert KEY not in f"{each} {each!r} {each.attempted} {each.why} {each.hint}"
        assert str(each).count(REDACTED) == 3


def test_no_line_of_the_log_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    register_secret(KEY)
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before, level = root.handlers, root.level
    try:
        log.setup()
        logging.getLogger("flywheel.tests").warning("it said %s", KEY)
        try:
            raise ValueError(KEY)
        except ValueError:
            logging.getLogger("flywheel.tests").exception("failed")
    finally:
        root.handlers = before
        root.setLevel(level)
    assert written.getvalue().count(REDACTED) >= 2
    assert KEY not in written.getvalue()


FUNCTION = """
import os
def keep(task):
    if task["do"] == "raise":
        raise ValueError("it was " + task["key"])
    return True, ", ".join(sorted(os.environ)) + " " + task["key"]
"""


def test_a_users_function_inherits_no_key_and_repeats_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OF_THE_JUDGE", "another-secret")
    monkeypatch.setenv("MY_SETTING", "kept")
    register_secret_variable("OF_THE_JUDGE")
    keep = PythonProcess(FUNCTION, Path("mine.py"), "keep", attempted="load it", seconds=60)
    said = keep({"do": "say", "key": KEY}).reason
    assert said is not None
    assert "MY_SETTING" in said and "PATH" in said
    assert "OPENAI_API_KEY" not in said and "OF_THE_JUDGE" not in said
    assert said.endswith(REDACTED)
    with pytest.raises(Exception, match=r"ValueError: it was \[secret\]"):
        keep({"do": "raise", "key": KEY})


def test_a_workers_log_is_quoted_without_secrets(tmp_path: Path) -> None:
    register_secret(KEY)
    (tmp_path / LOG_FILE).write_text(f"HTTPError: headers {{'authorization': 'Bearer {KEY}'}} {'x' * 280}\n")
    with pytest.raises(TrainError) as caught:
        result_of(tmp_path)
    assert "a\\test" not in str(caught.value)
    assert REDACTED[1:] in str(caught.value)


async def test_a_servers_words_are_quoted_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    def echo(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500, json={"error": {"message": "x" * 490 + request.headers["authorization"]}})

    replica = Replica("http://127.0.0.1:9", KEY)
    replica._http = httpx.AsyncClient(
        transport=httpx.MockTransport(echo), base_url=replica.url, headers={"authorization": KEY}
    )
    with pytest.raises(Exception, match=r"\[secret|xxx$") as caught:
        await replica.models()
    await replica.close()
    assert 'sk-"' not in str(caught.value)
