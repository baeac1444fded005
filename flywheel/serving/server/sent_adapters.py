"""Adapters that a server has copies of: sent by the daemon, or taken from a folder at the start of `flywheel serve`.

A copy has the hash of its files as its name (`tree_sha256`), so that nobody chooses a path here and no copy ever
changes. Each file is one request. The copy appears atomically, when its files are there and their hash is right; what
a killed server leaves is removed at the next start, and what a client leaves also when an adapter arrives later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from starlette.requests import Request

from flywheel.serving.adapter_files import FILES, why_changed
from flywheel.serving.alias_target import AliasTarget
from flywheel.system.files import make_private, private, sync, tree_sha256
from flywheel.system.server_limits import RefusedError

SECONDS: Final = 1800.0
"""Longest time for one file of an adapter, and between its files."""
LIMIT: Final = "The limit is serving.max_adapter_gb."
_HASH: Final = re.compile(r"[0-9a-f]{64}")


class SentAdapters:
    def __init__(self, folder: Path, max_bytes: int = sys.maxsize) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._one_at_a_time = asyncio.Lock()

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
        ab_test = target.ab_test and dataclasses.replace(target.ab_test, other=self.located(target.ab_test.other))
        path = target.path and self.find(target.path, target.sha256)
        return dataclasses.replace(target, path=path, ab_test=ab_test)

    async def receive(self, sha256: str, name: str, request: Request) -> None:
        """Store a file of an adapter, the body of a request. With its last file, the adapter appears. Raises
        RefusedError, and ClientDisconnect where the client leaves before the end; then nothing is left of the
        file."""
        if not _HASH.fullmatch(sha256) or name not in FILES:
            form = f"SHA256/{' and SHA256/'.join(FILES)}"
            raise RefusedError(400, f"an adapter is sent as {form}, with the hash of both in lower case")
        part = self._part()
        try:
            await asyncio.to_thread(make_private, self.folder)
            # Disk and hash work in a thread: the event loop is that of the server's inference.
            with _created(part) as file:
                async for piece in request.stream():
                    await asyncio.to_thread(file.write, piece)
                await asyncio.to_thread(_sync, file)
            async with self._one_at_a_time:
                await asyncio.to_thread(self._put, part, sha256, name)
        except OSError as error:
            raise RefusedError(507, f"its files cannot be stored: {error.strerror or error}") from None
        finally:
            _remove(part)

    def take(self, folder: Path, sha256: str) -> None:
        """Copy the adapter in a folder. Raises OSError, and ValueError for files with another hash."""
        make_private(self.folder)
        for name in FILES:
            part = self._part()
            try:
                with (folder / name).open("rb") as source, _created(part) as file:
                    shutil.copyfileobj(source, file)
                    _sync(file)
                self._put(part, sha256, name)
            except RefusedError:
                raise ValueError(why_changed(folder)) from None
            finally:
                _remove(part)

    def _part(self) -> Path:
        """A file while it arrives."""
        return self.folder / f".{secrets.token_hex(8)}"

    def _put(self, part: Path, sha256: str, name: str) -> None:
        """Move a whole file to those of its adapter, and with the last one these to their place."""
        place, beside = self.folder / sha256, self.folder / f".{sha256}"
        if place.is_dir():
            return
        for left in self.folder.glob(".*"):
            with contextlib.suppress(FileNotFoundError):  # Its request has ended.
                if left != beside and left.stat().st_mtime < time.time() - SECONDS:
                    _remove(left)
        beside.mkdir(mode=0o700, exist_ok=True)
        part.rename(beside / name)
        if sum(each.stat().st_size for each in beside.iterdir()) > self.max_bytes:
            _remove(beside)
            raise RefusedError(413, f"its files are longer than {self.max_bytes:,} bytes. {LIMIT}")
        if not all((beside / each).is_file() for each in FILES):
            return
        if tree_sha256(beside) != sha256:
            _remove(beside)
            why = "its files have another SHA-256: they were changed or damaged on the way, or there are others"
            raise RefusedError(400, why)
        beside.chmod(0o500)
        sync(beside)
        beside.rename(place)
        sync(self.folder)

    def copies(self) -> list[Path]:
        """The folders of all whole copies."""
        return list(self.folder.glob("[!.]*"))

    @staticmethod
    def remove(copies: Iterable[Path]) -> None:
        for copy in copies:
            _remove(copy)


def _created(path: Path) -> BinaryIO:
    return open(path, "xb", opener=private)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.fchmod(file.fileno(), 0o400)


def _remove(left: Path) -> None:
    with contextlib.suppress(OSError):
        left.chmod(0o700)
        shutil.rmtree(left) if left.is_dir() else left.unlink()
