"""Where the admin key of a server comes from, and that it is sent to no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.config.file import Config, parse
from flywheel.errors import ServeError
from flywheel.serving.server_keys import admin_key, admin_key_file, make_admin_key

LOCAL = "http://127.0.0.1:8000"


def config(folder: Path, **serving: Any) -> Config:
    return parse({"state": {"dir": "state"}, "serving": serving}, "test", folder)


def test_a_daemon_on_the_same_state_reads_the_key_that_serve_made(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert admin_key(settings, LOCAL, "ask it") is None
    admin_key_file(settings).parent.mkdir(parents=True)
    make_admin_key(settings)
    key = admin_key(settings, LOCAL, "ask it")
    assert key == admin_key_file(settings).read_text().strip()
    make_admin_key(settings)
    for url in (LOCAL, "http://localhost:1", "http://[::1]:8000"):
        assert admin_key(config(tmp_path), url, "ask it") == key


def test_the_key_of_this_machine_is_sent_to_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path)
    admin_key_file(settings).parent.mkdir(parents=True)
    make_admin_key(settings)
    with pytest.raises(ServeError, match="another machine") as refused:
        admin_key(settings, "http://10.0.0.7:8000", "ask it")
    assert "serving.admin_key_env" in refused.value.hint
    assert refused.value.condition == "misconfigured"
    assert admin_key(config(tmp_path, host="10.0.0.7"), "http://10.0.0.7:8000", "ask it")
    monkeypatch.setenv("ADMIN", "of my own")
    assert admin_key(config(tmp_path, admin_key_env="ADMIN"), "http://10.0.0.7:8000", "ask it") == "of my own"


@pytest.mark.parametrize("content", [b"\xff", b"a\nb\n", "schlüssel".encode()])
def test_a_key_file_that_is_damaged(tmp_path: Path, content: bytes) -> None:
    settings = config(tmp_path)
    admin_key_file(settings).parent.mkdir(parents=True)
    admin_key_file(settings).write_bytes(content)
    with pytest.raises(ServeError, match=r"admin\.key") as refused:
        admin_key(settings, LOCAL, "ask it")
    assert refused.value.hint


def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    settings = config(tmp_path)
    admin_key_file(settings).mkdir(parents=True)
    with pytest.raises(ServeError, match=r"admin\.key cannot be read \(Is a directory\)"):
        admin_key(settings, LOCAL, "ask it")
