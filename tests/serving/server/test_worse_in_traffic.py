"""An adapter that is good on held-out tasks and bad in traffic is rolled back by itself, on real vLLM."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import Connection, select, update

from flywheel.config.file import load
from flywheel.records.request_id import BASE_VERSION, mark_of
from flywheel.records.round import AdapterRef, RoundResult
from flywheel.records.states import RoundState, WatchState
from flywheel.store import deployments, rounds
from flywheel.store.kernel import schema
from flywheel.system.files import tree_sha256
from tests.conftest import MadeAdapter, VllmServer
from tests.factories.config import BOXED_RUBRIC, write_config
from tests.factories.judge_server import JudgeServer
from tests.factories.round import comparison, put_tested_round
from tests.factories.state import open_state, read_state, running_daemon

pytestmark = [pytest.mark.slow, pytest.mark.extended]

ALIAS = "watched-agent"
PATIENCE_SECONDS = 400
"""About 50 conversations suffice. The daemon looks every 15 s."""


def put_candidate(conn: Connection, adapter: MadeAdapter, directory: Path) -> None:
    """A round whose result is there: the gate is to find the adapter better."""
    put_tested_round(conn, 1, RoundState.EVALUATING, directory)
    ref = AdapterRef(name="r0001", path=adapter.path, sha256=tree_sha256(Path(adapter.path)))
    seen = comparison(0.5, tasks=40)
    result = RoundResult(round_id="r0001", outcome="trained", adapter=ref, comparison=seen, probe=adapter.probe)
    conn.execute(update(schema.rounds).values(result=result.model_dump(mode="json")))


async def test_it_is_rolled_back(
    vllm_server: VllmServer, adapters: dict[str, MadeAdapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_ADMIN_KEY", vllm_server.admin_key)
    versions: Counter[str] = Counter()
    with JudgeServer() as judge:  # what boxes an answer is right; the random weights of the adapter never do
        config = load(
            write_config(
                tmp_path,
                sources=[{"type": "calls"}],
                ingest={"settle_seconds": 0, "poll_seconds": 1},
                judge={"base_url": judge.base_url, "model": "judge"},
                filter={"rubric": str(BOXED_RUBRIC)},
                model={"base": str(vllm_server.base_path), "alias": ALIAS},
                serving={"urls": [vllm_server.url], "admin_key_env": "THE_ADMIN_KEY", "drain_seconds": 0},
                trigger={"min_samples": 10_000},
                deploy={"watch": {"new_share": 0.5, "until_units": 100_000, "max_days": 1}},
                daemon={"metrics": None},
            )
        )
        async with open_state(config.state_dir) as store:
            await store.write(put_candidate, adapters["good"], tmp_path / "rounds")
        async with running_daemon(config), httpx2.AsyncClient(timeout=120, headers=vllm_server.headers) as client:
            asked, until = itertools.count(0, 8), time.monotonic() + PATIENCE_SECONDS
            while True:
                row = await asyncio.to_thread(read_state, config.state_dir, last_watch)
                if row is not None and row.state == WatchState.ROLLED_BACK:
                    break
                assert time.monotonic() < until, f"after {versions}: {row}"
                if row is None:
                    await asyncio.sleep(0.5)  # The adapter is being proven.
                    continue
                number = next(asked)

                async def ask(conversation: int) -> None:
                    question = {"role": "user", "content": f"What is {conversation % 20} plus {conversation % 7}?"}
                    answer = await client.post(
                        f"{vllm_server.url}/v1/chat/completions",
                        json={"model": ALIAS, "messages": [question], "max_tokens": 24},
                        headers={"x-flywheel-conversation": f"conversation-{conversation}"},
                    )
                    assert answer.status_code == 200, answer.text
                    mark = mark_of(answer.json()["id"])
                    assert mark is not None
                    versions[mark.version] += 1

                await asyncio.gather(*(ask(number + each) for each in range(8)))
                await asyncio.sleep(1)
            before = versions[f"{ALIAS}@r0001"]
            await asyncio.gather(*(ask(1_000_000 + each) for each in range(8)))
    assert versions[f"{ALIAS}@r0001"] == before, "all conversations are the base model's again"
    assert versions.keys() == {f"{ALIAS}@r0001", BASE_VERSION}
    row = read_state(config.state_dir, last_watch)
    assert row is not None and row.reason.startswith("worse in traffic: r0001")
    assert read_state(config.state_dir, rounds.by_name, "r0001").state == RoundState.PROMOTED
    assert read_state(config.state_dir, deployments.active, ALIAS).adapter is None


def last_watch(conn: Connection) -> object:
    return conn.execute(select(schema.watches).order_by(schema.watches.c.id.desc()).limit(1)).one_or_none()
