"""An endpoint that repeats the key: nothing that is printed or stored has it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flywheel.secrets import REDACTED, URL_USERS
from flywheel.store.backup import CURRENT
from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.factories.config import write_chain, write_config, write_rubric
from tests.factories.local_server import JsonHandler, LocalServer
from tests.factories.trace import write_lines

KEY = "sk-of-the-judge-0123456789"
BACKUP = "sk-of-the-backup-0123456789"
EMBEDDING = "sk-of-the-embedder-0123456789"
LINES = [{"main_query": f"What is {n} plus 1?", "answer": f"It is {n + 1}."} for n in range(3)]


class Echo(LocalServer):
    """An endpoint whose every answer has the given status and repeats the Authorization header."""

    def __init__(self) -> None:
        self.status = 500
        self.body: Any = None
        self.asked = 0
        echo = self

        class Handler(JsonHandler):
            def get(self) -> None:
                echo.asked += 1
                header = self.headers.get("authorization", "")
                moved = {"location": f"/login?with={header.removeprefix('Bearer ')}"} if echo.status == 302 else {}
                self.send(echo.status, echo.answer(header), moved)

            def post(self, request: Any) -> None:
                self.get()

        super().__init__(Handler)

    def answer(self, header: str) -> bytes:
        if self.body is not None:
            return json.dumps(self.body).replace("HEADER", header).encode()
        return json.dumps({"error": {"message": f"{'x' * 270} what is {header}?", "headers": header}}).encode()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as echo:
        yield echo


@pytest.mark.parametrize(("password", "by"), [("s3cret-word", "file"), ("pw", "variable")])
def test_the_password_of_an_endpoint_is_sent_and_stored_nowhere(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str, by: str
) -> None:
    monkeypatch.setenv(URL_USERS, "")
    url = bench.judge.base_url.replace("://", f"://bob:{password}@")
    if by == "file":
        bench.settings["base_url"] = url
    else:
        bench.settings["base_url"] = None
        monkeypatch.setenv("OPENAI_BASE_URL", url)
    bench.lines("good boxed", "bad")
    said = [bench(*command) for command in (["filter"], ["status"], ["status", "--json"], ["doctor", "--ask-judge"])]
    assert {each["authorization"] for each in bench.judge.headers if "authorization" in each} == {
        f"Basic {base64.b64encode(f'bob:{password}'.encode()).decode()}"
    }
    bench.judge.behave("500")
    bench.lines("good boxed again")
    said.append(bench("filter"))
    assert "http://***@" in said[-1].out + said[-1].err
    said += [bench("config", "show"), bench("backup", tmp_path / "kept")]
    assert said[-1].code == 0
    for ran in said:
        assert f"bob:{password}" not in ran.out + ran.err
    stored = {path: content for path, content in bench.files().items() if not path.endswith("source.jsonl")}
    assert [path for path, content in stored.items() if f"bob:{password}".encode() in content] == (
        [str(tmp_path / "flywheel.yaml")] if by == "file" else []
    )
    assert any(f"{CURRENT}/configuration/flywheel.yaml" in path for path in stored)


def configured(folder: Path, echo: Echo, **sections: Any) -> Path:
    write_lines(folder / "source.jsonl", *LINES)
    write_rubric(folder, criteria=[{"id": "right", "value": "It is right."}])
    backup = {"model": "other", "base_url": echo.base_url, "api_key_env": "KEY_OF_THE_BACKUP"}
    judge = {"model": "judge", "base_url": echo.base_url, "api_key_env": "KEY_OF_THE_JUDGE"}
    return write_config(
        folder,
        sources=[{"type": "jsonl", "path": "source.jsonl"}],
        judge={**judge, "max_attempts": 1, "backup": backup},
        serving={"urls": [echo.base_url.removesuffix("/v1")], "admin_key_env": "KEY_OF_THE_SERVER"},
        filter={"rubric": "rubric.yaml", **sections},
    )


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
@pytest.mark.parametrize("status", [200, 302, 400, 401, 429, 500])
def test_a_judge_that_repeats_the_key(flywheel: Run, tmp_path: Path, echo: Echo, status: int) -> None:
    """Its words are cut behind the middle of the key."""
    echo.status = status
    config = configured(tmp_path, echo)
    said = looked_at(flywheel, config, ("ingest",), ("filter",), ("doctor", "--ask-judge"))
    assert echo.asked
    assert "sk-of" not in said
    assert status == 200 or REDACTED in said


@pytest.mark.slow
def test_a_verdict_that_repeats_the_key(flywheel: Run, tmp_path: Path, echo: Echo) -> None:
    echo.status = 200
    verdict = json.dumps({"criteria": {"right": {"reason": "HEADER", "choice": "yes"}}})
    echo.body = {"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]}
    said = looked_at(flywheel, configured(tmp_path, echo), ("ingest",), ("filter", "--json"))
    assert echo.asked
    assert "sk-of" not in said


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 401, 500])
def test_an_embedder_that_repeats_it(flywheel: Run, tmp_path: Path, echo: Echo, status: int) -> None:
    echo.status = status
    params = {"model": "e", "base_url": echo.base_url, "api_key": EMBEDDING, "max_attempts": 1}
    write_chain(tmp_path, {"type": "deduplication", "params": params})
    said = looked_at(flywheel, configured(tmp_path, echo, chain="chain.yaml"), ("ingest",), ("filter",))
    assert echo.asked
    assert status == 200 or REDACTED in said
    assert "sk-of" not in said


@pytest.mark.slow
def test_a_server_that_repeats_the_key(flywheel: Run, tmp_path: Path, echo: Echo) -> None:
    said = looked_at(flywheel, configured(tmp_path, echo), ("ingest",), ("rollback", "--to", "base"), ("doctor",))
    assert "sk-of" not in said
