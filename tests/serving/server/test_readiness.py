"""What a server answers from its start until somebody has said what its alias stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from flywheel.errors import ServeError
from flywheel.records.states import DeploymentState
from flywheel.serving.client.adapter_swap import look, swap
from flywheel.serving.client.replica_client import Replica
from tests.cases import for_each
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running, with_middleware

WAITS = {"waiting": {"agent": "nobody has said so"}}
KEYS = {"FLYWHEEL_API_KEY": "agents", "FLYWHEEL_ADMIN_KEY": "admin", "VLLM_API_KEY": "internal"}
VERSION = "agent@r0001"


def ask(url: str, model: str = "agent", **headers: str) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/chat/completions", json={"model": model, "messages": []}, headers=headers)


def ready(url: str) -> tuple[int, Any]:
    answer = httpx2.get(f"{url}/flywheel/ready")
    assert answer.headers.get("retry-after") == ("5" if answer.status_code == 503 else None)
    return answer.status_code, answer.json()


def counted(status: int, **aliases: int) -> tuple[int, Any]:
    return status, {"ready": status == 200, "health": 200, "aliases": aliases}


def test_a_first_start_without_a_daemon_answers() -> None:
    with running(with_middleware(FakeVllm())) as url:
        assert ask(url).json()["model"] == BASE
        assert ready(url) == counted(200, base=1)


def test_an_alias_that_waits_is_refused_with_the_reason(tmp_path: Path) -> None:
    app = FakeVllm()
    app.loaded[VERSION] = "/adapters/r0001"
    with running(with_middleware(app, **WAITS, **KEYS)) as url:
        refused = ask(url, authorization="Bearer agents")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        error = refused.json()["error"]
        assert (error["message"], error["type"]) == ("agent has no answer yet: nobody has said so", "server_error")
        assert "POST /v1/chat/completions" not in app.calls
        # By their own names, models answer: swaps prove versions before they point the alias at them.
        assert ask(url, BASE, authorization="Bearer agents").status_code == 200
        assert ask(url, VERSION, authorization="Bearer admin").status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="agents", max_retries=0)
        with client, pytest.raises(openai.InternalServerError, match="nobody has said so"):
            client.chat.completions.create(model="agent", messages=[])


def test_readiness_needs_no_key_tells_no_name_and_follows_the_alias() -> None:
    app = FakeVllm()
    two = {"FLYWHEEL_ALIAS": "agent\nother", **WAITS}
    with running(with_middleware(app, **two, **KEYS)) as url:
        assert ready(url) == counted(503, waiting=1, base=1)
        assert httpx2.get(f"{url}/health").status_code == 200, "the process lives: nothing should kill it"
        told = httpx2.get(f"{url}/flywheel/ready").text + httpx2.get(f"{url}/flywheel/ready/").text
        assert not any(name in told for name in ("agent", "other", BASE, "nobody"))
        confirmed = {"alias": "agent", "target": BASE, "expected": BASE}
        put = httpx2.put(f"{url}/flywheel/alias", json=confirmed, headers={"x-api-key": "admin"})
        assert put.status_code == 200
        assert ready(url) == counted(200, confirmed=1, base=1)
        assert ask(url, authorization="Bearer agents").json()["model"] == BASE
        app.faults["/health"] = (500, "the engine is dead")
        status, told_dead = ready(url)
        assert (status, told_dead["ready"], told_dead["health"]) == (503, False, 500)


def test_an_alias_of_no_target_does_not_keep_the_server_from_being_ready(tmp_path: Path) -> None:
    """The alias was renamed in the configuration, so that no daemon will ever set the old one."""
    file = tmp_path / "aliases.json"
    file.write_text(json.dumps({"old": {"target": "old@r0001", "path": "/gone"}}))
    with running(with_middleware(FakeVllm(), FLYWHEEL_ALIAS_FILE=str(file))) as url:
        assert ready(url) == counted(200, base=1)
        assert ask(url, "old").status_code == 503


@for_each("target", [BASE, VERSION])
def test_what_the_file_names_is_restored(tmp_path: Path, target: str) -> None:
    file = tmp_path / "aliases.json"
    file.write_text(json.dumps({"agent": {"target": target, "path": "/r" if target != BASE else None}}))
    app = FakeVllm()
    app.loaded[VERSION] = "/r"
    loaded = {"FLYWHEEL_ALIAS_FILE": str(file), "loaded": [VERSION]}
    with running(with_middleware(app, **loaded)) as url:
        assert ready(url) == counted(200, restored=1)
        assert ask(url).json()["model"] == target


async def test_a_swap_that_is_taken_back_leaves_the_alias_waiting(tmp_path: Path) -> None:
    """Also where the alias waits for a version that is not loaded: it must not be pointed at it."""
    saved = tmp_path / "aliases.json"
    saved.write_text(json.dumps({"agent": {"target": VERSION, "path": "/gone"}}))
    apps = [FakeVllm({BASE: PROBE.second.base}), FakeVllm({BASE: PROBE.second.base})]
    waits = [{"FLYWHEEL_ALIAS_FILE": str(saved)}, WAITS]

    async def fail(state: DeploymentState, _: object = None) -> None:
        if state is DeploymentState.ACTIVE:
            raise ServeError("write it down", "the disk is full", "")

    with (
        running(with_middleware(apps[0], **waits[0])) as one,
        running(with_middleware(apps[1], **waits[1])) as two,
    ):
        async with Replica(one) as first, Replica(two) as second:
            before = [await each.alias("agent") for each in (first, second)]
            assert [each.serves for each in before] == ["", ""]
            with pytest.raises(ServeError, match="disk is full"):
                await swap([first, second], "agent", None, None, fail)
            # Each setting has another revision.
            after = [await each.alias("agent") for each in (first, second)]
            assert [replace(each, revision=None) for each in after] == [
                replace(each, revision=None) for each in before
            ]
            assert [ask(url).status_code for url in (one, two)] == [503, 503]
            # A server that waits for a version may belong to another state: only its own daemon knows.
            report = await look([first, second], "agent")
            assert [each.serves for each in report.replicas] == ["", BASE]
            assert [ask(url).status_code for url in (one, two)] == [503, 200]
