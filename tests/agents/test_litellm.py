"""LiteLLM's genuine proxy, with the shipped configuration, passes on which conversation a call belongs to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from flywheel.serving.calls.call_log import CallLog
from tests.agents.running import EXAMPLES
from tests.factories.call_log import log_settings, stored
from tests.serving.fake_vllm import BASE, FakeVllm, running, with_middleware
from tests.waiting import StartError, wait_for

PROXY = shutil.which("litellm")
SHIPPED = EXAMPLES / "litellm" / "config.yaml"
KEY = f"sk-{secrets.token_hex(32)}"
FORWARDS = "forward_client_headers_to_llm_api: true"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROXY is None, reason="LiteLLM's proxy is not installed: `make test-litellm` does that"),
]


@contextlib.contextmanager
def proxy(config: Path, server: str, port: int) -> Iterator[str]:
    variables = {
        "FLYWHEEL_URL": f"{server}/v1",
        "FLYWHEEL_KEY": "unused",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
    }
    process = subprocess.Popen(
        [str(PROXY), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, **variables},
        cwd=config.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            if process.poll() is not None:
                raise StartError("LiteLLM's proxy has ended")
            with contextlib.suppress(httpx2.TransportError):
                return httpx2.get(f"{url}/health/liveliness", timeout=10).status_code == 200
            return False

        wait_for(answers, "LiteLLM's proxy", seconds=300)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("forwards", [True, False])
def test_the_proxy_passes_the_conversation_on(tmp_path: Path, free_port: int, forwards: bool) -> None:
    config = tmp_path / "config.yaml"
    text = SHIPPED.read_text()
    assert FORWARDS in text
    config.write_text(text if forwards else text.replace(FORWARDS, FORWARDS.replace("true", "false")))
    app, path = FakeVllm(), tmp_path / "serving" / "calls.db"
    app.loaded["my-agent@r0001"] = "/adapters/r0001"
    middleware = with_middleware(app, FLYWHEEL_ALIAS="my-agent", call_log=log_settings(path))
    headers = ({"x-flywheel-conversation": "thread 7"}, {"x-litellm-session-id": "session 7"}, {})
    with running(middleware) as server, proxy(config, server, free_port) as url:
        ab_test = {"target": BASE, "share": 0.5, "salt": "salt"}
        change = {"alias": "my-agent", "target": "my-agent@r0001", "ab_test": ab_test}
        assert httpx2.put(f"{server}/flywheel/alias", json=change).status_code == 200
        for given in headers:
            body = {"model": "my-agent", "messages": [{"role": "user", "content": "Who?"}]}
            answer = httpx2.post(
                f"{url}/v1/chat/completions",
                json=body,
                headers={**given, "authorization": f"Bearer {KEY}"},
                timeout=120,
            )
            assert answer.status_code == 200, answer.text
        with CallLog(path) as log:
            wait_for(lambda: log.state().newest >= len(headers), "the calls")
            kinds = [call.unit_kind for call in stored(log)]
    middleware._recorder.close()
    assert kinds == (["conversation", "session", "fallback"] if forwards else ["fallback"] * 3)
