"""`flywheel deploy` and `rollback` at a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from flywheel.store import deployments
from flywheel.system.lock import instance_lock
from tests import warm
from tests.cli.conftest import Run
from tests.daemon.conftest import server
from tests.factories.config import base_model, write_config
from tests.factories.documented_json import compare, documented
from tests.factories.metrics import by, parsed
from tests.factories.round import put_deployment, put_trained
from tests.factories.state import read_state, write_state
from tests.serving.fake_vllm import BASE, FakeVllm, settings_in
from tests.waiting import wait_for

__all__ = ["server"]


@pytest.fixture
def config(tmp_path: Path, server: tuple[FakeVllm, str]) -> Path:
    serving = {"urls": [server[1]], "drain_seconds": 0}
    return write_config(tmp_path, sources=[], model={"base": BASE, "alias": "agent"}, serving=serving)


@pytest.fixture
def two_adapters(tmp_path: Path, server: tuple[FakeVllm, str]) -> None:
    for number in (1, 2):
        write_state(tmp_path / "state", put_trained, number, tmp_path / f"r{number:04d}", server[0])


def test_a_state_that_is_not_there_is_not_made(flywheel: Run, config: Path, tmp_path: Path) -> None:
    for command in (("deploy", "r0001"), ("deploy", "base"), ("rollback",), ("rollback", "--to", "r1")):
        for options in ([], ["--json"]):
            flywheel(*command, "-c", config, *options).fails(
                1, "state.dir", f"no state at {tmp_path / 'state' / 'state.db'}"
            )
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("two_adapters")
def test_deploying_and_going_back(flywheel: Run, config: Path) -> None:
    ran = flywheel("deploy", "r0001", "-c", config)
    assert (ran.out, ran.err) == ("agent is now r0001\n", "")
    assert flywheel("deploy", "agent@r0002", "-c", config, "--json").json["adapter"] == "r0002"
    assert flywheel("rollback", "-c", config).out == "agent is now r0001\n"
    back = flywheel("rollback", "--to", "r0002", "-c", config, "--json").json
    compare(back, documented("rollback"), "rollback")
    assert back["adapter"] == "r0002"
    ran = flywheel("rollback", "--to", "base", "-c", config)
    assert (ran.out, ran.err) == ("agent is now the base model\n", "")


@pytest.mark.slow
@pytest.mark.usefixtures("two_adapters")
def test_a_name_that_no_adapter_has_moves_nothing(flywheel: Run, config: Path) -> None:
    """An empty one above all, which a script's unset variable leaves."""
    flywheel("deploy", "r0001", "-c", config)
    flywheel("deploy", "r0002", "-c", config)
    names = ("", "agent@", "other@r0001", "r0009", "../r0001", "r0001\x1b[2J", "r0001 ")
    for command in (words for name in names for words in (("deploy", name), ("rollback", "--to", name))):
        ran = flywheel(*command, "-c", config)
        assert (ran.code, ran.out) == (1, ""), command
        assert any(why in ran.err for why in ("no such adapter", "no adapter is named", "no version of agent"))
        assert "\x1b" not in ran.err
    assert flywheel("status", "-c", config, "--json").json["deployment"]["adapter"] == "r0002"


@pytest.mark.slow
def test_status_says_what_each_server_serves_and_what_is_wrong(
    flywheel: Run, config: Path, two_adapters: None, server: tuple[FakeVllm, str]
) -> None:
    url = server[1]
    gone = "http://127.0.0.1:9"
    config.write_text(config.read_text().replace(f"- {url}", f"- {url}\n  - {gone}"))
    state = flywheel("status", "--json", "-c", config).json
    compare(state, documented("status"), "status")
    counts = dict.fromkeys(("calls", "missed", "dropped", "refused", "to_erase"), 0)
    not_pulled = {"condition": "", "error": "", **counts}
    unknown = {"condition": "", "serves": "", "error": "", "since": None, "looked_at": None, "calls": not_pulled}
    assert state["replicas"] == [{"url": url, **unknown}, {"url": gone, **unknown}]
    assert re.search(
        rf"^server +{url}\n +not checked yet \(requires `flywheel run`\)$", flywheel("status", "-c", config).out, re.M
    )
    conditions = by(exposed(flywheel, config)["flywheel_replica_condition"], "replica", "condition")
    assert conditions == {f"{url} not looked at yet": 1, f"{gone} not looked at yet": 1}

    assert flywheel("run", "--once", "-c", config).code == 0
    first, second = flywheel("status", "--json", "-c", config).json["replicas"]
    assert (first["condition"], first["serves"], first["error"]) == ("ok", BASE, "")
    assert (second["condition"], second["serves"]) == ("unreachable", "")
    assert "flywheel serve" in second["error"]
    text = flywheel("status", "-c", config).out
    assert re.search(rf"^server +{url}\n +ok, serves {BASE}, since \S+ \S+ UTC, checked \S+ \S+ UTC$", text, re.M)
    assert re.search(
        rf"^server +{gone}\n +unreachable, since .* UTC\n +cannot ask {gone} .*`flywheel serve`", text, re.M
    )
    metrics = exposed(flywheel, config)
    conditions = by(metrics["flywheel_replica_condition"], "replica", "condition")
    assert conditions == {f"{url} ok": 1, f"{gone} unreachable": 1}
    assert by(metrics["flywheel_replica_serves"], "replica", "model") == {f"{url} {BASE}": 1}
    looked = by(metrics["flywheel_replica_looked_timestamp_seconds"], "replica")
    assert looked[url] == datetime.fromisoformat(first["looked_at"]).timestamp()
    assert set(looked) == {url, gone}


def exposed(flywheel: Run, config: Path) -> dict[str, list[Sample]]:
    return parsed(flywheel("status", "--metrics", "-c", config).out)


@pytest.mark.slow
def test_a_deploy_that_is_stopped_takes_back_what_it_did(
    config: Path, two_adapters: None, server: tuple[FakeVllm, str]
) -> None:
    app, _ = server
    app.slow_paths.add("/v1/completions")
    process = warm.Popen(
        [sys.executable, "-m", "flywheel", "deploy", "r0001", "-c", config], stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: "POST /v1/completions" in app.calls or process.poll() is not None, "the proof", seconds=120)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 143
    assert "SIGTERM stopped it" in err
    assert "Traceback" not in err
    assert app.loaded == {}, "what was loaded is unloaded"
    [failed] = read_state(config.parent / "state", deployments.history, "agent", 9)
    assert failed.state == "failed"


@pytest.mark.slow
def test_who_waits_for_another_swap_is_told_so(flywheel: Run, config: Path, two_adapters: None) -> None:
    with contextlib.ExitStack() as swapping:
        swapping.enter_context(instance_lock(config.parent / "state", "swap.lock"))
        process = warm.Popen(
            [sys.executable, "-m", "flywheel", "deploy", "r0001", "-c", config], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        try:
            said = next(line for line in process.stderr if "waiting" in line)
            swapping.close()
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
    assert f"process {os.getpid()}" in said


@pytest.mark.training
@pytest.mark.parametrize("is_deployed", [False, True])
def test_serve_asks_the_state_what_is_deployed(
    flywheel: Run,
    tmp_path: Path,
    two_adapters: None,
    monkeypatch: pytest.MonkeyPatch,
    free_port: int,
    is_deployed: bool,
) -> None:
    """Where the server's own file is missing: it has another port now, or another machine."""
    if is_deployed:
        write_state(tmp_path / "state", put_deployment, "r0002")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, _arguments, environment: started.append(environment))
    model = {"base": base_model(tmp_path), "alias": "agent"}
    own = write_config(tmp_path, name="own.yaml", model=model, serving={"port": free_port})
    assert flywheel("serve", "-c", own).code == 0
    told = settings_in(started[0])["waiting"]
    assert told == (
        {"agent": "agent@r0002 is deployed, and this server has not served it yet"} if is_deployed else {}
    )
