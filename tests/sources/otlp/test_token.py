"""Clients that do not know the token, and addresses that need one."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from flywheel.config.file import parse
from flywheel.errors import ConfigError
from flywheel.sources.otlp.receiver import Receiver
from tests.sources.otlp.exporting import PROTOBUF, ids, request, span

GOOD = request(span(1)).SerializeToString()
TOKEN = "a-long-random-text"


@pytest.mark.parametrize("listen", ["0.0.0.0:4318", "[::]:4318", "192.0.2.1:4318", "gateway:4318"])
def test_an_address_that_others_reach_needs_a_token(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match=r"other machines reach listen .*token_env") as caught:
        parse({"sources": [{"type": "otlp", "listen": listen}]}, "test", tmp_path)
    assert caught.value.exit_code == 78
    parse({"sources": [{"type": "otlp", "listen": listen, "token_env": "T"}]}, "test", tmp_path)


@pytest.mark.parametrize("listen", ["127.0.0.1:4318", "127.1.2.3:1", "[::1]:4318", "localhost:4318"])
def test_an_address_of_this_machine_needs_none(tmp_path: Path, listen: str) -> None:
    parse({"sources": [{"type": "otlp", "listen": listen}]}, "test", tmp_path)


async def test_who_does_not_know_the_token_sends_nothing(inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_A_TEST", TOKEN)
    receiver = Receiver("127.0.0.1:0", inbox, token_env="TOKEN_OF_A_TEST")
    await receiver.start()
    async with httpx2.AsyncClient() as client:
        for given in (
            {},
            {"Authorization": "Bearer another"},
            {"Authorization": TOKEN},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": f"Bearer {TOKEN.upper()}"},
            {"Authorization": "Bearer é"},
        ):
            headers = {**PROTOBUF, **{name: value.encode() for name, value in given.items()}}
            answer = await client.post(receiver.url, content=GOOD, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert TOKEN not in answer.text
        assert ids(inbox) == []
        for scheme in ("Bearer", "bearer", "BEARER"):
            known = {**PROTOBUF, "Authorization": f"{scheme} {TOKEN}"}
            assert (await client.post(receiver.url, content=GOOD, headers=known)).status_code == 200
    assert ids(inbox) == [1]
    await receiver.stop()


@pytest.mark.parametrize("held", [None, "", " x", "käse"])
async def test_a_token_that_is_none_is_a_wrong_configuration(
    inbox: Path, monkeypatch: pytest.MonkeyPatch, held: str | None
) -> None:
    monkeypatch.delenv("TOKEN_OF_A_TEST", raising=False)
    if held is not None:
        monkeypatch.setenv("TOKEN_OF_A_TEST", held)
    with pytest.raises(ConfigError, match="TOKEN_OF_A_TEST, which token_env names"):
        await Receiver("127.0.0.1:0", inbox, token_env="TOKEN_OF_A_TEST").start()
