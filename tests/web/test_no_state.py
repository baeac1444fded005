"""Without a state the pages say what to do, store nothing, and show the state as soon as it is there."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from flywheel.config.file import load
from flywheel.errors import EXIT_CONFIG
from flywheel.web.server import application
from tests import warm
from tests.factories.config import write_config
from tests.factories.state import write_state
from tests.factories.web import TOKEN, WAIT_SECONDS, address_in, asgi_client, csrf_from
from tests.waiting import wait_for

HTML = {"accept": "text/html"}


async def test_pages_explain_and_other_addresses_are_unavailable(configuration: Path) -> None:
    config = load(configuration)
    async with asgi_client(application(config)) as asked:
        for path in ("/", "/tasks", "/tasks/t-1", "/rounds/r0001", "/gate", "/nothing"):
            page = await asked.get(path, headers=HTML)
            assert (page.status_code, "There is no state yet" in page.text) == (200, True), path
        for path in ("/tasks.jsonl", "/labels/export", "/health"):
            refused = await asked.get(path)
            assert refused.status_code == 503, path
            assert json.loads(refused.text) == {
                "error": f"There is no state at {config.state_dir}/state.db yet: nothing was read."
            }
        assert (await asked.get("/static/page.css")).status_code == 200
        assert not config.state_dir.exists()
        write_state(config.state_dir, lambda _: None)
        assert "Overview" in (await asked.get("/", headers=HTML)).text
        assert (await asked.get("/tasks.jsonl")).status_code == 200


async def test_forms_make_no_state(configuration: Path) -> None:
    config = load(configuration)
    async with asgi_client(application(config, token=TOKEN), authorization=f"Bearer {TOKEN}", **HTML) as asked:
        for path in ("/tasks/t-1/label", "/tasks/t-1/release", "/dead-letters", "/rounds/r0001/deploy"):
            form = {"csrf": await csrf_from(asked), "label": "accept", "verb": "drop", "ids": "1"}
            assert (await asked.post(path, data=form)).status_code == 503, path
        assert not config.state_dir.exists()


async def test_only_the_token_shows_what_is_configured(configuration: Path) -> None:
    async with asgi_client(application(load(configuration), token=TOKEN)) as asked:
        refused = await asked.get("/")
        assert refused.status_code == 401 and "state.db" not in refused.text
        sign_in = await asked.get("/sign-in", headers=HTML)
        assert sign_in.status_code == 200 and "no state" not in sign_in.text


async def test_paths_are_inert_and_one_that_may_not_be_seen_is_not_there(tmp_path: Path) -> None:
    sources = [{"path": str(tmp_path / "<script>alert(1)</script>\u202e.sqlite")}, {"path": "/proc/1/root/x"}]
    config = load(write_config(tmp_path, sources=sources))
    async with asgi_client(application(config)) as asked:
        page = (await asked.get("/", headers=HTML)).text
    assert "<script>alert" not in page and "U+202E" in page
    assert "/proc/1/root/x: nothing is there" in page


async def test_an_empty_file_is_no_state_and_one_of_another_version_is_an_error(configuration: Path) -> None:
    config = load(configuration)
    config.state_dir.mkdir()
    state = config.state_dir / "state.db"
    state.touch()
    async with asgi_client(application(config), **HTML) as asked:
        assert "There is no state yet" in (await asked.get("/")).text
        state.unlink()
        write_state(config.state_dir, lambda conn: conn.exec_driver_sql("UPDATE meta SET value = '999'").close())
        newer = await asked.get("/")
    assert newer.status_code == 503 and "a newer Flywheel" in newer.text


@pytest.mark.slow
def test_the_command_starts_without_a_state_and_not_with_a_broken_configuration(
    configuration: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "flywheel", "web", "--port", "0"]
    with (tmp_path / "log").open("wb") as log:
        process = warm.Popen([*command, "-c", str(configuration)], stdout=log, stderr=log)
    try:
        address = wait_for(lambda: address_in(tmp_path / "log"), "the pages")
        assert "There is no state yet" in httpx2.get(address, headers=HTML, timeout=WAIT_SECONDS).text
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert "no state at" in (tmp_path / "log").read_text()
    assert not (configuration.parent / "state").exists()
    (tmp_path / "flywheel.yaml").write_text("sauces: []\n")
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == EXIT_CONFIG and "sauces" in done.stderr, done.stderr
