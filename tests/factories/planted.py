"""Distinctive strings, and where they are found in files: raw, in JSON, and in compressed streams."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

WORDS: Final = ("Quixolotl-7731", "鲸鱼座信标七", "🦩🪼beacon")
"""ASCII, CJK and emoji."""
_ZLIB: Final = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


def planted_in(
    folder: Path, words: Collection[str] = WORDS, *, decode: Callable[[Sequence[int]], str] | None = None
) -> dict[str, set[str]]:
    """The files below a folder in which each word is found, by word; those in which none is are left out.

    Looked at are the bytes of each file, each zlib stream in it, and the same with JSON escapes of up to two levels.
    With `decode`, lists of token ids in JSON are decoded, too.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        for content in _contents(path.read_bytes()):
            for word in words:
                if any(form in content for form in _forms(word)):
                    found.setdefault(word, set()).add(path.relative_to(folder).as_posix())
            if decode is not None:
                for text in map(decode, _token_lists(content)):
                    for word in (word for word in words if word in text):
                        found.setdefault(word, set()).add(path.relative_to(folder).as_posix())
    return found


def _forms(word: str) -> set[bytes]:
    once = json.dumps(word)[1:-1]
    return {word.encode(), once.encode(), json.dumps(once)[1:-1].encode()}


def _contents(raw: bytes) -> Iterator[bytes]:
    yield raw
    for begin in _ZLIB:
        at = raw.find(begin)
        while at >= 0:
            yield _inflated(raw, at)
            at = raw.find(begin, at + 1)


def _inflated(raw: bytes, at: int) -> bytes:
    """What a zlib stream has; one that is cut off, as in a freed page, still shows its beginning."""
    stream, found = zlib.decompressobj(), b""
    with contextlib.suppress(zlib.error):
        for start in range(at, len(raw), 256):
            found += stream.decompress(raw[start : start + 256])
            if stream.eof:
                break
    return found


def _token_lists(content: bytes) -> Iterator[list[int]]:
    for line in content.split(b"\n"):
        if line[:1] in (b"{", b"["):
            try:
                yield from _lists(json.loads(line))
            except ValueError:
                continue


def _lists(value: object) -> Iterator[list[int]]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        if value and all(type(each) is int for each in value):
            yield value
        else:
            for each in value:
                yield from _lists(each)
