"""Targets on one server: each has an alias that moves by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from flywheel.config import parse
from flywheel.daemon.deployer import Deployer
from flywheel.store.kernel.database import Store
from tests.daemon.test_deployer import put_adapter
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, running, with_middleware


async def test_both_aliases_flip_and_each_goes_back_by_itself(tmp_path: Path) -> None:
    app = FakeVllm({BASE: PROBE.second.base})

    async def answered_by(alias: str) -> str:
        request = {"model": alias, "messages": []}
        answer = await asyncio.to_thread(httpx2.post, f"{url}/v1/chat/completions", json=request)
        return str(answer.json()["model"])

    async def both() -> list[str]:
        return [await answered_by("plan"), await answered_by("doer")]

    with running(with_middleware(app, FLYWHEEL_ALIAS="plan\ndoer")) as url:
        raw = {
            "state": {"dir": "state"},
            "sources": [],
            "model": {"base": BASE},
            "targets": {"planner": {"alias": "plan"}, "doer": {}},
            "serving": {"urls": [url], "drain_seconds": 0},
        }
        config = parse(raw, "test", tmp_path)
        store = await Store.open(config.state_dir)
        try:
            for number in (1, 2, 3):
                path = tmp_path / f"r{number:04d}"
                path.mkdir()
                (path / "weights").write_text(str(number))
                app.weights[str(path)] = PROBE.second.adapter
                await store.write(put_adapter, number, path)
            planner, doer = (Deployer(store, own) for own in config.by_target().values())
            await planner.deploy("r0001", "test")
            assert await both() == ["plan@r0001", BASE]
            await doer.deploy("r0002", "test")
            assert await both() == ["plan@r0001", "doer@r0002"]
            await planner.deploy("r0003", "test")
            for deployer in (planner, doer):
                assert (await deployer.reconcile()).errors == ()
            assert {"plan@r0003", "doer@r0002"} <= app.loaded.keys(), "each looks after its own versions"
            assert await both() == ["plan@r0003", "doer@r0002"]
            await planner.rollback()
            assert await both() == ["plan@r0001", "doer@r0002"]
            await doer.rollback("base")
            assert await both() == ["plan@r0001", BASE]
        finally:
            await store.close()
