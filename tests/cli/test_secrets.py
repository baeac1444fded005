"""An endpoint that repeats the key: nothing that is printed or stored has it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.secrets import REDACTED
from tests.cli.conftest import Run

KEY = "sk-of-the-judge-0123456789"
BACKUP = "sk-of-the-backup-0123456789"
EMBEDDING = "sk-of-the-embedder-0123456789"
LINES = [{"main_query": f"What is {n} plus 1?", "answer": f"It is {n + 1}."} for n in range(3)]


class Echo:
    """An endpoint whose every answer has the given status and repeats the Authorization header."""

    def __init__(self) -> None:
        self.status = 500
        self.body: Any = None
        self.asked = 0

    def answer(self, header: str) -> bytes:
        if self.body is not None:
            return json.dumps(self.body).replace("HEADER", header).encode()
        return json.dumps({"error": {"message": f"{'x' * 270} what is {header}?", "headers": header}}).encode()


@pytest.fixture
def echo() -> Iterator[tuple[Echo, str]]:
    behaviour = Echo()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.do_GET()

        def do_GET(self) -> None:
            behaviour.asked += 1
            header = self.headers.get("authorization", "")
            body = behaviour.answer(header)
            self.send_response(behaviour.status)
            if behaviour.status == 302:
                self.send_header("location", f"/login?with={header.removeprefix('Bearer ')}")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield behaviour, f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def configured(folder: Path, url: str, **sections: Any) -> Path:
    (folder / "source.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    rubric = {"id": "r", "criteria": [{"id": "right", "value": "It is right."}]}
    (folder / "rubric.yaml").write_text(yaml.safe_dump(rubric))
    backup = {"model": "other", "base_url": url, "api_key_env": "KEY_OF_THE_BACKUP"}
    judge = {"model": "judge", "base_url": url, "api_key_env": "KEY_OF_THE_JUDGE"}
    config = {
        "sources": [{"type": "jsonl", "path": "source.jsonl"}],
        "state": {"dir": "state"},
        "judge": {**judge, "max_attempts": 1, "backup": backup},
        "serving": {"urls": [url.removesuffix("/v1")], "admin_key_env": "KEY_OF_THE_SERVER"},
        "filter": {"rubric": "rubric.yaml", **sections},
    }
    path = folder / "flywheel.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_JUDGE", f"{KEY}|{KEY}-2")
    monkeypatch.setenv("KEY_OF_THE_BACKUP", BACKUP)
    monkeypatch.setenv("KEY_OF_THE_SERVER", KEY + "-s")


def looked_at(flywheel: Run, config: Path, *commands: tuple[str, ...]) -> str:
    """All that the commands print, and all files of the state."""
    texts = []
    for command in (*commands, ("status",), ("status", "--json"), ("status", "--metrics"), ("tasks", "--json")):
        ran = flywheel(*command, "-c", config)
        texts += [ran.out, ran.err]
    files = [path for path in (config.parent / "state").rglob("*") if path.is_file()]
    assert any(path.name == "state.db" for path in files)
    return "\n".join((*texts, *(path.read_bytes().decode("utf-8", "replace") for path in files)))


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 302, 400, 401, 403, 404, 413, 429, 500])
def test_a_judge_that_repeats_the_key(flywheel: Run, tmp_path: Path, echo: tuple[Echo, str], status: int) -> None:
    """Its words are cut behind the middle of the key."""
    behaviour, url = echo
    behaviour.status = status
    config = configured(tmp_path, url)
    said = looked_at(flywheel, config, ("ingest",), ("filter",), ("doctor", "--ask-judge"))
    assert behaviour.asked
    assert "sk-of" not in said
    assert status == 200 or REDACTED in said


def test_a_verdict_that_repeats_the_key(flywheel: Run, tmp_path: Path, echo: tuple[Echo, str]) -> None:
    behaviour, url = echo
    behaviour.status = 200
    verdict = json.dumps({"criteria": {"right": {"reason": "HEADER", "choice": "yes"}}})
    behaviour.body = {"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]}
    said = looked_at(flywheel, configured(tmp_path, url), ("ingest",), ("filter", "--json"))
    assert behaviour.asked
    assert "sk-of" not in said


@pytest.mark.parametrize("status", [200, 401, 500])
def test_an_embedder_that_repeats_it(flywheel: Run, tmp_path: Path, echo: tuple[Echo, str], status: int) -> None:
    behaviour, url = echo
    behaviour.status = status
    params = {"model": "e", "base_url": url, "api_key": EMBEDDING, "max_attempts": 1}
    (tmp_path / "chain.yaml").write_text(
        yaml.safe_dump({"id": "c", "filters": [{"type": "deduplication", "params": params}]})
    )
    said = looked_at(flywheel, configured(tmp_path, url, chain="chain.yaml"), ("ingest",), ("filter",))
    assert behaviour.asked
    assert status == 200 or REDACTED in said
    assert "sk-of" not in said


def test_a_server_that_repeats_the_key(flywheel: Run, tmp_path: Path, echo: tuple[Echo, str]) -> None:
    _, url = echo
    said = looked_at(flywheel, configured(tmp_path, url), ("ingest",), ("rollback", "--to", "base"), ("doctor",))
    assert "sk-of" not in said
