"""Documents: the Markdown and text files of a directory, cut into passages. They are read and never written.

A passage ends at a heading once it has some length, and between paragraphs where it would be too long. Files that
are no text in UTF-8 are left out, with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from flywheel.records.task import storable

SUFFIXES: Final = (".md", ".txt")
LARGEST: Final = 4 << 20
"""Bytes of a document."""
LONGEST: Final = 6_000
"""Characters of a passage: about 1,500 tokens."""
ENOUGH: Final = 1_500
"""Characters from which on a heading begins the next passage: short sections stay together."""
_BETWEEN: Final = re.compile(r"\n(?=#{1,6} )|\n[ \t]*\n")


class Passage(NamedTuple):
    """A part of a document, whose path is relative to the directory."""

    document: str
    text: str


def passages_of(directory: Path) -> tuple[list[Passage], dict[str, str]]:
    """The passages of all documents below a directory, in the order of their paths, and why files were left out.

    A text that occurs several times is one passage. Hidden files and folders are not read, and links to folders are
    not followed.
    """
    root = Path(os.path.realpath(directory))
    found: dict[str, Passage] = {}
    left_out: dict[str, str] = {}
    for path in (root, *sorted(root.rglob("*"))):
        name = storable(str(path.relative_to(root)))
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        try:
            if path.is_dir() and not path.is_symlink():
                os.scandir(path).close()  # `rglob` leaves out what it may not list
            elif path.suffix.lower() in SUFFIXES:
                for text in filter(None, cut(_text(path, root))):
                    found.setdefault(text, Passage(name, text))
        except OSError as error:
            left_out[name] = error.strerror or str(error)
        except UnicodeDecodeError as error:
            left_out[name] = f"it is not UTF-8: {error.reason} at byte {error.start:,}"
        except ValueError as error:
            left_out[name] = str(error)
    return list(found.values()), left_out


def _text(path: Path, root: Path) -> str:
    """Raises OSError, and ValueError for what is no text of this directory."""
    if not Path(os.path.realpath(path)).is_relative_to(root):
        raise ValueError("it is a link to a file outside of the directory")
    if not path.is_file():
        raise ValueError("it is no regular file")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
    text = path.read_bytes().decode("utf-8-sig")
    if not text.strip():
        raise ValueError("it is empty")
    if "\0" in text:
        raise ValueError("it has NUL characters, as text in UTF-16 has")
    return text


def cut(text: str) -> Iterator[str]:
    """The passages of a text, each of at most `LONGEST` characters. Nothing is lost but white space between them."""
    passage = ""
    for block in _BETWEEN.split("\n".join(text.splitlines())):
        begins_section = block.startswith("#") and len(passage) >= ENOUGH
        for start in range(0, len(block), LONGEST):
            part = block[start : start + LONGEST]
            if begins_section or len(passage) + 2 + len(part) > LONGEST:
                yield passage
                passage = ""
            begins_section, passage = False, f"{passage}\n\n{part}".strip()
    yield passage
