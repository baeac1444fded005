"""Which replicas can be named, and what is said of the others before anything is swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config, parse
from flywheel.errors import ConfigError


def config(*urls: str) -> Config:
    return parse({"serving": {"urls": list(urls)}}, "test", Path("/"))


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        ([], "1 or more items"),
        (["http://h:8000", "http://h:8000/"], "named twice"),
        (["http://h", "http://H:80"], "named twice"),
        (["http://127.0.0.1:8000", "http://localhost:8000"], "named twice"),
        (["http://h:8000/v1"], "without /v1"),
        (["http://h:8000/v1/"], "without /v1"),
        (["h:8000"], "http://, https:// or dns://"),
        (["localhost:8000"], "http://, https:// or dns://"),
        (["http://"], "http://, https:// or dns://"),
        (["unix:///run/vllm"], "http://, https:// or dns://"),
        (["http://h:800000"], "port"),
        (["http://[::1:8000"], "its host is no address"),
        (["http://h:8000/?key=s3cret"], "host, port and path"),
        (["http://me:s3cret@h:8000"], "serving.api_key_env"),
        (["http://h:8 000"], "port"),
        (["http://h h:8000"], "host"),
        (["dns://h"], "dns://NAME:PORT"),
        (["dns://h:8000/path"], "dns://NAME:PORT"),
        (["dns://h:8000", "dns://H:8000/"], "named twice"),
    ],
)
def test_what_names_no_replica_is_a_wrong_configuration(urls: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=r"serving\.urls") as refused:
        config(*urls)
    assert why in str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("serving", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"port": 9001}, "http://127.0.0.1:9001"),
        ({"host": "192.168.1.7", "port": 9001}, "http://192.168.1.7:9001"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8000"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "::1", "port": 1}, "http://[::1]:1"),
        ({"host": "agents.internal"}, "http://agents.internal:8000"),
        ({"port": 9001, "urls": ["http://other:8000"]}, "http://other:8000"),
    ],
)
def test_without_urls_the_server_is_where_serve_starts_it(serving: dict[str, Any], url: str) -> None:
    assert parse({"serving": serving}, "test", Path("/")).serving.urls == [url]


@pytest.mark.parametrize("port", [0, 65_536, "x"])
def test_a_port_that_is_none(port: object) -> None:
    with pytest.raises(ConfigError, match=r"serving\.port") as refused:
        parse({"serving": {"port": port}}, "test", Path("/"))
    assert "serving.urls" not in str(refused.value)


def test_replicas() -> None:
    urls = ["http://127.0.0.1:8000/", "https://[::1]:8001", "http://h/replica/2", "http://h/replica/3", "http://h:81"]
    assert config(*urls).serving.urls == [url.rstrip("/") for url in urls]
