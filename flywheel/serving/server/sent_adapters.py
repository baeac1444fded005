"""Adapters that a server has copies of: sent by the daemon, or taken from a folder at the start of `flywheel serve`.

A copy has the hash of its files as its name (`tree_sha256`), so that nobody chooses a path here and no copy ever
changes. It appears atomically, when its hash is right; what a killed server leaves is removed at the next start.
Runs also inside vLLM's process: standard library only, and modules that do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from flywheel.serving.adapter_files import FILES, why_changed
from flywheel.serving.alias_target import AliasTarget
from flywheel.system.files import make_private, private, sync, tree_sha256
from flywheel.system.server_limits import Receive, RefusedError

SECONDS: Final = 1800.0
"""Longest time for the files of one adapter."""
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_PIECE_BYTES: Final = 1 << 20
_SIZE_BYTES: Final = 8


class SentAdapters:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """By `ServerSettings.sent_adapters`. Removes what a killed server has left unfinished."""
        if settings is None:
            return None
        sent = cls(Path(settings["path"]), settings["max_bytes"])
        for left in sent.folder.glob(".*"):
            _remove(left)
        return sent

    def find(self, path: str, sha256: str | None) -> str:
        """The folder of an adapter on this machine: `path`, or the copy with the hash if there is no such path."""
        copy = self.folder / (sha256 or "")
        is_copy = not Path(path).is_dir() and sha256 is not None and _HASH.fullmatch(sha256) and copy.is_dir()
        return str(copy) if is_copy else path

    def located(self, target: AliasTarget) -> AliasTarget:
        """The target with the folders on this machine."""
        split = target.split and dataclasses.replace(target.split, other=self.located(target.split.other))
        path = target.path and self.find(target.path, target.sha256)
        return dataclasses.replace(target, path=path, split=split)

    async def receive(self, sha256: str, receive: Receive) -> bool:
        """Store the files in the body of a request, which are those of `tree_bytes`; False if the client disconnects
        before its end. Then, and where RefusedError is raised, nothing is left of them."""
        if not _HASH.fullmatch(sha256):
            raise RefusedError(400, "an adapter is sent under the SHA-256 of its files, in lower case")
        body, beside = _Body(receive), self._beside(sha256)
        try:
            await asyncio.to_thread(self._begin, beside)
            for name in FILES:
                head = await body.read(len(name) + 1 + _SIZE_BYTES)
                if head[:-_SIZE_BYTES] != name.encode() + b"\0":
                    raise RefusedError(400, f"expected {' and '.join(FILES)}, and nothing else")
                with _created(beside / name) as file:
                    await body.copy(int.from_bytes(head[-_SIZE_BYTES:]), file)
            if not await body.is_at_end() or body.digest.hexdigest() != sha256:
                raise RefusedError(400, "its files have another SHA-256: they were changed, or damaged on the way")
            await asyncio.to_thread(self._end, beside, sha256)
            return True
        except _DisconnectError:
            return False
        except OSError as error:
            raise RefusedError(507, f"its files cannot be stored: {error.strerror or error}") from None
        finally:
            await asyncio.to_thread(_remove, beside)

    def take(self, folder: Path, sha256: str) -> None:
        """Copy the adapter in a folder. Raises OSError, and ValueError for files with another hash."""
        if (self.folder / sha256).is_dir():
            return
        beside = self._beside(sha256)
        try:
            self._begin(beside)
            for name in FILES:
                with (folder / name).open("rb") as source, _created(beside / name) as file:
                    shutil.copyfileobj(source, file, _PIECE_BYTES)
                    _sync(file)
            if tree_sha256(beside) != sha256:
                raise ValueError(why_changed(folder))
            self._end(beside, sha256)
        finally:
            _remove(beside)

    def copies(self) -> list[Path]:
        """The folders of all whole copies."""
        return list(self.folder.glob("[!.]*"))

    @staticmethod
    def remove(copies: Iterable[Path]) -> None:
        for copy in copies:
            _remove(copy)

    def _beside(self, sha256: str) -> Path:
        """A folder for files while they arrive."""
        return self.folder / f".{sha256}.{secrets.token_hex(4)}"

    def _begin(self, beside: Path) -> None:
        make_private(self.folder)
        beside.mkdir(mode=0o700)

    def _end(self, beside: Path, sha256: str) -> None:
        place = self.folder / sha256
        beside.chmod(0o500)
        sync(beside)
        try:
            beside.rename(place)
        except OSError:
            if not place.is_dir():  # else the same files have arrived twice
                raise
        sync(self.folder)


class _DisconnectError(Exception):
    """The client has disconnected, or what limits its bodies ended the request."""


class _Body:
    """The body of a request in pieces. Methods raise RefusedError where it ends too early, and _DisconnectError."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept = bytearray()
        self._has_more = True
        self.digest = hashlib.sha256()

    async def read(self, size: int) -> bytes:
        """The next bytes, exactly so many."""
        while len(self._kept) < size:
            if not await self._more():
                raise RefusedError(400, "its files are cut short")
        piece = bytes(self._kept[:size])
        del self._kept[:size]
        await asyncio.to_thread(self.digest.update, piece)
        return piece

    async def copy(self, size: int, file: BinaryIO) -> None:
        """Write the next bytes to a file, and fsync it. Disk and hash work in a thread: the event loop is that of the
        server's inference."""
        while size > 0:
            piece = await self.read(min(size, _PIECE_BYTES))
            await asyncio.to_thread(file.write, piece)
            size -= len(piece)
        await asyncio.to_thread(_sync, file)

    async def is_at_end(self) -> bool:
        return not self._kept and not await self._more()

    async def _more(self) -> bool:
        """Wait for more bytes; False at the end."""
        while self._has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectError
            self._has_more = bool(message.get("more_body"))
            if piece := message.get("body"):
                self._kept += piece
                return True
        return False


def _created(path: Path) -> BinaryIO:
    return open(path, "xb", opener=private)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.fchmod(file.fileno(), 0o400)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.chmod(0o700)
        shutil.rmtree(folder)
