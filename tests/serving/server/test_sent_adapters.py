"""Adapters that are sent to a server: only whole ones with the right hash appear, and only for the admin key."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flywheel.errors import ServeError
from flywheel.serving.adapter_files import FILES
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.environment_variables import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    FILE_VARIABLE,
)
from flywheel.serving.server.sent_adapters import SentAdapters
from flywheel.system.files import tree_bytes, tree_sha256
from flywheel.system.server_limits import Message, RefusedError
from tests.factories.adapter import put_files
from tests.serving.elsewhere import elsewhere
from tests.serving.fake_vllm import BASE, FakeVllm, running, with_middleware
from tests.waiting import until

NAME = "agent@r0001"
ADMIN = {"authorization": "Bearer admin"}
MAX_BYTES = 100_000


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """On the daemon's disk."""
    (tmp_path / "daemon").mkdir()
    return put_files(tmp_path / "daemon" / "adapter")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    return tmp_path / "server" / "adapters"


@pytest.fixture
def server(app: FakeVllm, tmp_path: Path, copies: Path) -> Iterator[str]:
    """A server on another machine, which has none of the daemon's files."""
    variables = {
        ADMIN_KEY_VARIABLE: "admin",
        API_KEY_VARIABLE: "agents",
        FILE_VARIABLE: str(tmp_path / "aliases.json"),
    }
    sent = {"path": str(copies), "max_bytes": MAX_BYTES}
    with running(elsewhere(with_middleware(app, sent_adapters=sent, **variables), tmp_path / "daemon")) as url:
        yield url


def found_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


async def test_an_adapter_is_sent_to_a_server_that_does_not_have_it(
    app: FakeVllm, server: str, adapter: Path, copies: Path
) -> None:
    sha256 = tree_sha256(adapter)
    async with Replica(server, "admin") as replica:
        assert await replica.load(NAME, str(adapter), sha256)
        assert app.loaded == {NAME: str(copies / sha256)}
        assert tree_sha256(copies / sha256) == sha256
        assert not await replica.load(NAME, str(adapter), sha256), "it is known by its hash"
        assert await replica.has(NAME, str(adapter), sha256)
        with pytest.raises(ServeError, match="that name is taken by another adapter"):
            await replica.has(NAME, str(adapter), "0" * 64)
        await replica.point("agent", NAME, BASE, str(adapter), sha256)
        assert (await replica.alias("agent")).path == str(copies / sha256), "from which a restart loads it"
    modes = [oct(each.stat().st_mode & 0o777) for each in (copies, copies / sha256, copies / sha256 / FILES[1])]
    assert modes == ["0o700", "0o500", "0o400"]


async def test_what_was_sent_is_not_sent_again(app: FakeVllm, server: str, adapter: Path, copies: Path) -> None:
    sha256 = tree_sha256(adapter)
    async with Replica(server, "admin") as replica:
        await replica.load(NAME, str(adapter), sha256)
        app.loaded.clear()
        (adapter / FILES[1]).unlink()
        assert await replica.load(NAME, str(adapter), sha256)


async def test_a_server_with_the_files_on_its_own_disk_gets_none(
    app: FakeVllm, tmp_path: Path, adapter: Path, copies: Path
) -> None:
    with running(with_middleware(app, sent_adapters={"path": str(copies), "max_bytes": MAX_BYTES})) as url:
        async with Replica(url) as replica:
            assert await replica.load(NAME, str(adapter), tree_sha256(adapter))
    assert app.loaded == {NAME: str(adapter)}
    assert found_in(copies) == []


async def test_a_server_that_accepts_none_is_an_error_with_the_remedy(app: FakeVllm, adapter: Path) -> None:
    with running(elsewhere(with_middleware(app), adapter.parent)) as url:
        async with Replica(url) as replica:
            with pytest.raises(ServeError, match="finds no adapter"):
                await replica.load(NAME, str(adapter), tree_sha256(adapter))


async def test_copies_are_removed_when_they_are_out_of_use(
    app: FakeVllm, server: str, tmp_path: Path, copies: Path
) -> None:
    (tmp_path / "daemon").mkdir()
    folders = [put_files(tmp_path / "daemon" / name, name.encode()) for name in ("r1", "r2")]
    hashes = [tree_sha256(each) for each in folders]
    async with Replica(server, "admin") as replica:
        for name, folder, sha256 in zip(("agent@r1", "agent@r2"), folders, hashes, strict=True):
            await replica.load(name, str(folder), sha256)
        await replica.point("agent", "agent@r2", BASE, str(folders[1]), hashes[1])
        app.loaded.pop("agent@r2")
        await replica.unload("agent@r1")
        await until(lambda: found_in(copies) == [hashes[1]], "the copy that no alias names is removed")
        assert await replica.load("agent@r2", str(folders[1]), hashes[1]), "and a restart loads the other"


def put(url: str, sha256: str, body: Any, **headers: str) -> httpx2.Response:
    return httpx2.put(f"{url}/flywheel/adapters/{sha256}", content=body, headers=ADMIN | headers)


@pytest.mark.parametrize(("key", "status"), [("wrong", 401), ("agents", 403)])
def test_only_the_admin_key_may_send(server: str, adapter: Path, copies: Path, key: str, status: int) -> None:
    answer = put(server, tree_sha256(adapter), b"".join(tree_bytes(adapter)), authorization=f"Bearer {key}")
    assert answer.status_code == status
    assert found_in(copies) == []


@pytest.mark.parametrize(
    "name",
    ["x", "0" * 63, "A" * 64, "../" + "0" * 61, "%2e%2e/x", ".." + "0" * 62, "0" * 64 + "/x", "0" * 64 + "%00"],
)
def test_a_name_is_a_hash_and_nothing_else(server: str, adapter: Path, copies: Path, name: str) -> None:
    answer = put(server, name, b"".join(tree_bytes(adapter)))
    assert answer.status_code in (400, 404)
    assert found_in(copies) == []
    assert found_in(copies.parent) == []


def test_larger_ones_are_refused(server: str, tmp_path: Path, adapter: Path, copies: Path) -> None:
    large = put_files(tmp_path / "large", bytes(MAX_BYTES))
    pieces = list(tree_bytes(large))
    for body in (b"".join(pieces), iter(pieces)):  # with its length, and in chunks
        answer = put(server, tree_sha256(large), body)
        assert answer.status_code == 413
        assert "serving.max_adapter_gb" in answer.text
    assert found_in(copies) == []


@pytest.mark.parametrize(
    "others",
    [{"pickled.bin": b"x"}, {"adapter_extra.py": b"x"}, {"README.md": b"x"}, {"zzz": b"x"}],
    ids=lambda others: next(iter(others)),
)
def test_no_other_file_is_accepted(server: str, tmp_path: Path, copies: Path, others: dict[str, bytes]) -> None:
    folder = put_files(tmp_path / "other", **others)
    assert put(server, tree_sha256(folder), b"".join(tree_bytes(folder))).status_code == 400
    assert found_in(copies) == []


def test_files_with_another_hash_are_refused(server: str, adapter: Path, copies: Path) -> None:
    body = b"".join(tree_bytes(adapter))
    answer = put(server, tree_sha256(adapter), body[:-1] + b"!")
    assert answer.status_code == 400
    assert "another SHA-256" in answer.text
    assert found_in(copies) == []


def test_only_put_is_there(server: str) -> None:
    assert httpx2.get(f"{server}/flywheel/adapters/{'0' * 64}", headers=ADMIN).status_code == 405


async def received(sent: SentAdapters, sha256: str, pieces: Iterator[bytes], *, whole: bool = True) -> bool:
    async def messages() -> AsyncIterator[Message]:
        for piece in pieces:
            yield {"type": "http.request", "body": piece, "more_body": True}
        yield {"type": "http.request"} if whole else {"type": "http.disconnect"}

    following = messages()
    return await sent.receive(sha256, lambda: anext(following))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 7_100), whole=st.booleans(), size=st.integers(1, 4000))
def test_a_torn_upload_leaves_nothing(adapter: Path, copies: Path, cut: int, whole: bool, size: int) -> None:
    """Wherever it ends, as a client that disconnects or as a body that is too short, and however it is divided."""
    body = b"".join(tree_bytes(adapter))
    cut = min(cut, len(body) - 1)
    sent = SentAdapters(copies, MAX_BYTES)
    pieces = (body[start : min(start + size, cut)] for start in range(0, cut, size))
    upload = received(sent, tree_sha256(adapter), pieces, whole=whole)
    if whole:
        with pytest.raises(RefusedError):
            asyncio.run(upload)
    else:
        assert not asyncio.run(upload)
    assert found_in(copies) == []


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 10_000))
def test_a_whole_upload_appears_however_it_is_divided(adapter: Path, copies: Path, size: int) -> None:
    body, sha256 = b"".join(tree_bytes(adapter)), tree_sha256(adapter)
    sent = SentAdapters(copies, MAX_BYTES)
    for _ in range(2):  # the second time it is there already
        pieces = (body[start : start + size] for start in range(0, len(body), size))
        assert asyncio.run(received(sent, sha256, pieces))
        assert found_in(copies) == [sha256]
        assert tree_sha256(copies / sha256) == sha256
    sent.remove(sent.copies())
    assert found_in(copies) == []


def test_memory_does_not_grow_with_the_size(tmp_path: Path, copies: Path) -> None:
    folder = put_files(tmp_path / "large", bytes(64 << 20))
    sha256 = tree_sha256(folder)
    tracemalloc.start()
    try:
        asyncio.run(received(SentAdapters(copies, 1 << 30), sha256, tree_bytes(folder)))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert found_in(copies) == [sha256]


def test_what_a_killed_server_left_is_removed_at_the_next_start(adapter: Path, copies: Path) -> None:
    sent = SentAdapters(copies, MAX_BYTES)
    sent.take(adapter, tree_sha256(adapter))
    left = copies / f".{'0' * 64}.abcd1234"
    left.mkdir()
    (left / FILES[0]).write_bytes(b"{")
    assert SentAdapters.of({"path": str(copies), "max_bytes": 1}) is not None
    assert found_in(copies) == [tree_sha256(adapter)]


def test_a_disk_that_cannot_be_written_is_an_error_of_the_server(server: str, adapter: Path, copies: Path) -> None:
    copies.parent.mkdir()
    copies.touch()
    answer = put(server, tree_sha256(adapter), b"".join(tree_bytes(adapter)))
    assert answer.status_code == 507
    assert "cannot be stored" in answer.text
