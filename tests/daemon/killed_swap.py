"""Processes of a swap that kill themselves.

`python -m tests.daemon.killed_swap server FOLDER PORT` is a server with the middleware. It dies at the request that
the file `FOLDER/die` names, as METHOD, path and `before` or `after` it is handled.

`python -m tests.daemon.killed_swap command|daemon CONFIG ADAPTER STEP ARRIVAL WHEN` deploys an adapter, as a command
or beside a running daemon of the same process, and dies before or after its n-th arrival at a step. Ends with 3 if it
never got there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import uvicorn

from flywheel.config.file import load
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.service import Service
from flywheel.serving.client.replica_client import Replica
from flywheel.store.kernel.database import Store
from tests.serving.fake_vllm import BASE, PROBE, FakeVllm, with_middleware

REQUESTS: Final = {
    "unload": "POST /v1/unload_lora_adapter",
    "load": "POST /v1/load_lora_adapter",
    "proof": "POST /v1/completions",
    "flip": "PUT /flywheel/alias",
}
"""The steps of a swap that a server sees."""
CLIENT_STEPS: Final = {"unload": "unload", "load": "load", "proof": "logprobs", "flip": "point"}
"""The methods of a replica's client by the step that they take."""
RECORD: Final = "record"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalServer:
    """A server with the middleware that can be told to die at a request."""

    def __init__(self, folder: Path) -> None:
        self._order = folder / "die"
        self._app = FakeVllm({BASE: PROBE.second.base})
        self._app.weights = _Weights()
        self._serving = with_middleware(self._app, FLYWHEEL_ALIAS_FILE=str(folder / "aliases.json"))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        order = self._order.read_text() if self._order.exists() else ""
        request, _, when = order.rpartition(" ")
        is_last = request == f"{scope['method']} {scope['path']}"
        if is_last:
            self._order.unlink()
        if is_last and when == "before":
            die()

        async def sent(message: Any) -> None:
            if is_last:
                die()
            await send(message)

        await self._serving(scope, receive, sent)


class _Weights(dict[str, list[float]]):
    """Those of every adapter."""

    def get(self, key: str, default: Any = None) -> Any:
        return PROBE.second.adapter if key else default


def serve(folder: str, port: str) -> None:
    app: Any = MortalServer(Path(folder))
    uvicorn.run(app, port=int(port), log_level="warning", lifespan="off", ws="none")


def set_trap(step: str, arrival: int, when: str) -> None:
    left = arrival

    def wrapped(call: Callable[..., Awaitable[Any]], applies: Callable[..., bool]) -> Any:
        async def trapped(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            is_it = applies(*arguments)
            left -= is_it
            is_last = is_it and left == 0  # both servers are asked at the same time
            if is_last and when == "before":
                die()
            result = await call(*arguments, **named)
            if is_last:
                die()
            return result

        return trapped

    if step == RECORD:
        Store.write = wrapped(Store.write, lambda _self, function, *_: function.__name__ == "_activated")  # type: ignore[method-assign]
    else:
        name = CLIENT_STEPS[step]
        setattr(Replica, name, wrapped(getattr(Replica, name), lambda *_: True))


async def deploy(config_file: str, adapter: str, *, as_daemon: bool) -> None:
    config = load(Path(config_file))
    store = await Store.open(config.state_dir)
    service = Service(config, store) if as_daemon else None
    running = asyncio.create_task(service.run()) if service is not None else None
    await Deployer(store, config).deploy(adapter, "test")
    if running is not None and service is not None:
        service.stop()
        await running


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "server":
        serve(*arguments)
        return
    config, adapter, step, arrival, when = arguments
    set_trap(step, int(arrival), when)
    asyncio.run(deploy(config, adapter, as_daemon=what == "daemon"))
    sys.exit(3)


if __name__ == "__main__":
    main()
