"""Adapters that are sent to a server: only whole ones with the right hash appear, and only for the admin key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from flywheel.errors import ServeError
from flywheel.serving.adapter_files import FILES
from flywheel.serving.client.replica_client import Replica
from flywheel.serving.environment_variables import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    FILE_VARIABLE,
)
from flywheel.serving.server.sent_adapters import SentAdapters
from flywheel.system.files import tree_sha256
from flywheel.system.server_limits import Message, RefusedError
from tests import warm
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


def put(url: str, place: str, body: Any, **headers: str) -> httpx2.Response:
    return httpx2.put(f"{url}/flywheel/adapters/{place}", content=body, headers=ADMIN | headers)


def put_all(url: str, folder: Path, sha256: str, **headers: str) -> list[httpx2.Response]:
    return [put(url, f"{sha256}/{name}", (folder / name).read_bytes(), **headers) for name in FILES]


@pytest.mark.parametrize(("key", "status"), [("wrong", 401), ("agents", 403)])
def test_only_the_admin_key_may_send(server: str, adapter: Path, copies: Path, key: str, status: int) -> None:
    answers = put_all(server, adapter, tree_sha256(adapter), authorization=f"Bearer {key}")
    assert [answer.status_code for answer in answers] == [status, status]
    assert found_in(copies) == []


ZEROS = "0" * 64


@pytest.mark.parametrize(
    "name", ["x", "0" * 63, "A" * 64, "../" + "0" * 61, "%2e%2e", ".." + "0" * 62, "0" * 63 + "%00"]
)
def test_a_name_is_a_hash_and_nothing_else(server: str, adapter: Path, copies: Path, name: str) -> None:
    assert {answer.status_code for answer in put_all(server, adapter, name)} <= {400, 404}
    assert found_in(copies) == []
    assert found_in(copies.parent) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "pickled.bin",
        "README.md",
        f"..%2f{FILES[0]}",
        f"%2e%2e/{FILES[0]}",
        f"x/{FILES[0]}",
        f"{FILES[0]}%00",
    ],
)
def test_no_other_file_is_accepted(server: str, copies: Path, name: str) -> None:
    assert put(server, f"{ZEROS}/{name}", b"x").status_code in (400, 404)
    assert found_in(copies) == []
    assert found_in(copies.parent) == []


def test_larger_ones_are_refused(server: str, tmp_path: Path, copies: Path) -> None:
    large = put_files(tmp_path / "large", bytes(MAX_BYTES + 1))
    content = (large / FILES[1]).read_bytes()
    for body in (content, iter([content[:1000], content[1000:]])):  # with its length, and in chunks
        answer = put(server, f"{tree_sha256(large)}/{FILES[1]}", body)
        assert answer.status_code == 413
        assert "serving.max_adapter_gb" in answer.text
    assert found_in(copies) == []


def test_all_files_together_have_a_limit(server: str, tmp_path: Path, copies: Path) -> None:
    large = put_files(tmp_path / "large", bytes(MAX_BYTES - 1))
    first, last = put_all(server, large, tree_sha256(large))
    assert (first.status_code, last.status_code) == (200, 413)
    assert "serving.max_adapter_gb" in last.text
    assert found_in(copies) == []


async def test_an_adapter_with_other_files_is_not_sent(server: str, tmp_path: Path, copies: Path) -> None:
    (tmp_path / "daemon").mkdir()
    folder = put_files(tmp_path / "daemon" / "other", **{"README.md": b"x"})
    async with Replica(server, "admin") as replica:
        with pytest.raises(ServeError, match="another SHA-256"):
            await replica.load(NAME, str(folder), tree_sha256(folder))
    assert found_in(copies) == []


async def test_a_file_that_cannot_be_read_is_an_error_in_words(server: str, adapter: Path, copies: Path) -> None:
    sha256 = tree_sha256(adapter)
    (adapter / FILES[1]).unlink()
    async with Replica(server, "admin") as replica:
        with pytest.raises(ServeError, match="the server finds no adapter in"):
            await replica.load(NAME, str(adapter), sha256)
        (adapter / FILES[1]).mkdir()
        with pytest.raises(ServeError, match=f"send {adapter / FILES[1]} to .*: it cannot be read"):
            await replica.load(NAME, str(adapter), sha256)
    assert not (copies / sha256).exists()


def test_files_with_another_hash_are_refused(server: str, adapter: Path, copies: Path) -> None:
    sha256 = tree_sha256(adapter)
    with (adapter / FILES[1]).open("r+b") as file:
        file.write(b"!")
    first, last = put_all(server, adapter, sha256)
    assert (first.status_code, last.status_code) == (200, 400)
    assert "another SHA-256" in last.text
    assert found_in(copies) == []


def test_an_adapter_appears_with_its_last_file(server: str, adapter: Path, copies: Path) -> None:
    sha256 = tree_sha256(adapter)
    for name in (*reversed(FILES), FILES[0]):  # in any order, and again
        assert not (copies / sha256).exists() or name == FILES[0]
        assert put(server, f"{sha256}/{name}", (adapter / name).read_bytes()).status_code == 200
    assert found_in(copies) == [sha256]
    assert tree_sha256(copies / sha256) == sha256


def test_only_put_is_there(server: str) -> None:
    assert httpx2.get(f"{server}/flywheel/adapters/{ZEROS}/{FILES[0]}", headers=ADMIN).status_code == 405


async def received(sent: SentAdapters, place: str, pieces: Iterator[bytes], *, whole: bool = True) -> None:
    async def messages() -> AsyncIterator[Message]:
        for piece in pieces:
            yield {"type": "http.request", "body": piece, "more_body": True}
        yield {"type": "http.request"} if whole else {"type": "http.disconnect"}

    following, (sha256, name) = messages(), place.split("/")
    await sent.receive(sha256, name, Request({"type": "http"}, lambda: anext(following)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), cut=st.integers(0, 7_000), whole=st.booleans(), size=st.integers(1, 4000))
def test_a_torn_upload_leaves_nothing(
    adapter: Path, copies: Path, name: str, cut: int, whole: bool, size: int
) -> None:
    """Wherever a file ends, as a client that disconnects or as a body that is too short, and however it is
    divided."""
    sha256, sent = tree_sha256(adapter), SentAdapters(copies, MAX_BYTES)
    for each in FILES:
        content = (adapter / each).read_bytes()
        end = min(cut, len(content) - 1) if each == name else len(content)
        pieces = (content[start : min(start + size, end)] for start in range(0, end, size))
        with contextlib.suppress(RefusedError, ClientDisconnect):
            asyncio.run(received(sent, f"{sha256}/{each}", pieces, whole=whole or each != name))
    # Of an adapter without its last file, those before it wait for it out of sight.
    assert set(found_in(copies)) <= {f".{sha256}"}
    assert SentAdapters.of({"path": str(copies), "max_bytes": MAX_BYTES}) is not None
    assert found_in(copies) == []


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 10_000))
def test_a_whole_upload_appears_however_it_is_divided(adapter: Path, copies: Path, size: int) -> None:
    sha256 = tree_sha256(adapter)
    sent = SentAdapters(copies, MAX_BYTES)
    for _ in range(2):  # the second time it is there already
        for name in FILES:
            content = (adapter / name).read_bytes()
            pieces = (content[start : start + size] for start in range(0, len(content), size))
            asyncio.run(received(sent, f"{sha256}/{name}", pieces))
        assert found_in(copies) == [sha256]
        assert tree_sha256(copies / sha256) == sha256
    sent.remove(sent.copies())
    assert found_in(copies) == []


async def test_the_same_adapter_may_arrive_twice_at_once(adapter: Path, copies: Path) -> None:
    sha256, sent = tree_sha256(adapter), SentAdapters(copies, MAX_BYTES)
    contents = [(name, (adapter / name).read_bytes()) for name in FILES * 4]
    await asyncio.gather(*(received(sent, f"{sha256}/{name}", iter([content])) for name, content in contents))
    assert found_in(copies) == [sha256]
    assert tree_sha256(copies / sha256) == sha256


def test_what_a_client_left_long_ago_is_removed_when_an_adapter_arrives(adapter: Path, copies: Path) -> None:
    sent = SentAdapters(copies, MAX_BYTES)
    for left in ("1" * 64, "2" * 64):
        asyncio.run(received(sent, f"{left}/{FILES[0]}", iter([b"{"])))
    os.utime(copies / f".{'1' * 64}", (0, 0))
    asyncio.run(received(sent, f"{tree_sha256(adapter)}/{FILES[0]}", iter([b"{"])))
    assert found_in(copies) == sorted([f".{'2' * 64}", f".{tree_sha256(adapter)}"])


def test_memory_does_not_grow_with_the_size(tmp_path: Path, copies: Path) -> None:
    folder = put_files(tmp_path / "large", bytes(64 << 20))
    sha256 = tree_sha256(folder)
    tracemalloc.start()
    try:
        sent = SentAdapters(copies, 1 << 30)
        for name in FILES:
            with (folder / name).open("rb") as file:
                pieces = iter(lambda: file.read(1 << 20), b"")
                asyncio.run(received(sent, f"{sha256}/{name}", pieces))
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
    (copies / ".abcd1234").write_bytes(b"{")
    assert SentAdapters.of({"path": str(copies), "max_bytes": 1}) is not None
    assert found_in(copies) == [tree_sha256(adapter)]


UPLOAD = """
import asyncio, os, signal, sys
from pathlib import Path
from starlette.requests import Request
from flywheel.serving.adapter_files import FILES
from flywheel.serving.server.sent_adapters import SentAdapters
left = int(sys.argv[4])
def counted(original):
    def step(*given, **more):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return original(*given, **more)
    return step
for name in ("mkdir", "chmod", "fsync", "fchmod", "rename"):
    setattr(os, name, counted(getattr(os, name)))
async def upload(sent, name):
    async def message():
        return {"type": "http.request", "body": Path(sys.argv[1], name).read_bytes()}
    await sent.receive(sys.argv[3], name, Request({"type": "http"}, message))
sent = SentAdapters(Path(sys.argv[2]), 1 << 20)
for name in FILES:
    asyncio.run(upload(sent, name))
"""
"""Sends an adapter, and dies before a step."""


def test_a_killed_server_shows_a_whole_adapter_or_none(adapter: Path, copies: Path) -> None:
    sha256 = tree_sha256(adapter)
    copies.parent.mkdir()
    for steps in range(40):
        command = [sys.executable, "-c", UPLOAD, str(adapter), str(copies), sha256, str(steps)]
        killed = warm.run(command, timeout=120).returncode != 0
        shown = [name for name in found_in(copies) if not name.startswith(".")]
        assert shown in ([], [sha256])
        assert shown == [] or tree_sha256(copies / sha256) == sha256
        sent = SentAdapters.of({"path": str(copies), "max_bytes": 1 << 20})
        assert sent is not None
        assert found_in(copies) == shown
        sent.remove(sent.copies())
        if not killed:
            break
    assert not killed
    assert steps > 8


def test_a_disk_that_cannot_be_written_is_an_error_of_the_server(server: str, adapter: Path, copies: Path) -> None:
    copies.parent.mkdir()
    copies.touch()
    for answer in put_all(server, adapter, tree_sha256(adapter)):
        assert answer.status_code == 507
        assert "cannot be stored" in answer.text
