"""A vLLM that a user starts with the command of the pages answers by the alias, and adapters are deployed to it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import httpx2
import pytest

from demo.ports import held_port
from flywheel.errors import ServeError
from flywheel.records.round import AdapterRef
from flywheel.records.states import DeploymentState
from flywheel.serving.client.adapter_swap import SwapReport, rollback, swap
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.server.vllm_command import MODULE
from flywheel.system.files import tree_sha256
from tests.conftest import POLICY, START_SECONDS, MadeAdapter, stop_server

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/start/first-round.md", "docs/connect/agents.md")
SMALL: Final = "--dtype float32 --max-model-len 512 --max-num-seqs 8 --host 127.0.0.1"
"""What the page leaves to vLLM's defaults, which are for a GPU and a large model."""


def block(page: str) -> str:
    """The console block of a page that starts vLLM."""
    found = re.findall(r"^```console\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [text] = [each for each in found if "--middleware" in each]
    return str(text)


@pytest.mark.parametrize("page", PAGES[1:])
def test_the_pages_show_the_same_command(page: str) -> None:
    assert block(page) == block(PAGES[0])


def recording() -> dict[str, str]:
    """The variable by which the server records calls, as the page of agents has it."""
    page = (ROOT / "docs" / "connect" / "agents.md").read_text()
    [(name, value)] = re.findall(r"`(FLYWHEEL_SERVER_SETTINGS)='([^']*)'`", page)
    return {name: value}


class Server(NamedTuple):
    url: str
    admin_key: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The commands of the page as they stand, but for the model, the port, and `vllm serve`: it is a module here."""
    home = tmp_path_factory.mktemp("by-hand")
    install, *exports, started = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block(PAGES[0]), re.MULTILINE)
    assert install.startswith("pip install --no-deps") and all(each.startswith("export ") for each in exports)
    vllm, serve, model, *arguments = shlex.split(started)
    assert (vllm, serve) == ("vllm", "serve")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FLYWHEEL_", "VLLM_API"))}
    with held_port() as port, (home / "log").open("wb") as log:
        command = [sys.executable, "-m", MODULE, "--model", str(POLICY), "--served-model-name", model, *arguments]
        run = shlex.join([*command, *SMALL.split(), "--port", str(port)])
        lines = ["set -eu", *exports, f"printenv FLYWHEEL_ADMIN_KEY >{shlex.quote(str(home / 'key'))}", f"exec {run}"]
        process = subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            cwd=home,
            env={**env, **recording(), "HOME": str(home), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_ready(url):
                assert process.poll() is None and time.monotonic() < deadline, (home / "log").read_text()[-4000:]
                time.sleep(0.3)
            yield Server(url, (home / "key").read_text().strip())
        finally:
            stop_server(process)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/flywheel/ready", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def answered_by(server: Server) -> str:
    request = {"model": "my-agent", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "max_tokens": 4}
    return str(httpx2.post(f"{server.url}/v1/chat/completions", json=request, timeout=120).json()["model"])


async def recorded_versions(replica: Replica) -> list[str]:
    page = await replica.calls(0, 10)
    assert page is not None
    return [call.version for _, call in page.calls]


async def ignore(_: DeploymentState, __: SwapReport | None = None) -> None: ...


@pytest.mark.slow
@pytest.mark.training
async def test_an_adapter_is_deployed_to_it_and_rolled_back(server: Server, adapters: dict[str, MadeAdapter]) -> None:
    base, made = "Qwen/Qwen3-4B", adapters["good"]
    assert answered_by(server) == base
    adapter = AdapterRef(name="r0001", path=made.path, sha256=tree_sha256(Path(made.path)))
    async with Replica(server.url, None) as stranger:
        with pytest.raises(ServeError, match="admin"):
            await swap([stranger], "my-agent", adapter, made.probe, ignore)
    async with Replica(server.url, server.admin_key) as replica:
        await swap([replica], "my-agent", adapter, made.probe, ignore)
        assert answered_by(server) == "my-agent@r0001"
        async with asyncio.timeout(60):
            while await recorded_versions(replica) != ["base", "my-agent@r0001"]:
                await asyncio.sleep(0.1)
        await rollback([replica], "my-agent", None)
    assert answered_by(server) == base


@pytest.mark.slow
def test_the_middleware_needs_no_package_that_vllm_lacks() -> None:
    code = "import sys, flywheel; old = {*sys.modules}; import MODULE; print(*{*sys.modules} - old)"
    command = [sys.executable, "-c", code.replace("MODULE", "flywheel.serving.server.middleware")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    loaded = {name.partition(".")[0] for name in shown.split()} - sys.stdlib_module_names
    ours, fastapis = (
        {"flywheel", "msgspec"},
        {"anyio", "python_multipart", "sniffio", "starlette", "typing_extensions"},
    )
    assert loaded <= ours | fastapis
