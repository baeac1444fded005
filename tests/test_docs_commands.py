"""Commands in the documentation can be typed as they stand there."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup

from flywheel import errors
from flywheel.cli.app import ALIASES, EXIT_UNREAD
from flywheel.cli.entry_point import EXIT_INTERRUPTED
from tests.factories import commands

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
OF_ALL = {"-h", "--help", "--config", "-c"}


@pytest.fixture(scope="module")
def root() -> TyperGroup:
    return commands.root()


def pieces(text: str) -> Iterator[str]:
    """Everything that is set as code: lines of blocks, and spans."""
    block = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    for found in block.findall(text):
        yield from found.split("\n")[1:-1]
    rest = block.sub("", text)
    yield from re.findall(r"^ {4}(\S.*)$", rest, re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", rest):
        yield " ".join(span.split())


def command_lines(text: str) -> Iterator[str]:
    """What follows `flywheel` where that is the command, up to a comment or to two blanks and words about it."""
    for piece in pieces(text):
        if found := re.match(r"(?:\$ )?flywheel ([a-z].*)$", piece):
            yield re.split(r"\s+#|\s{2,}|\s[&>|]", found[1])[0]


CONTENT = [
    path
    for name in ("filters", "rubrics", "configs", "systemd")
    for path in sorted((ROOT / name).iterdir())
    if path.is_file()
]


@pytest.mark.parametrize("file", CONTENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_a_file_to_edit_names_exists(root: TyperGroup, file: Path) -> None:
    for line in re.findall(r"`flywheel ([a-z][^`]*)`", file.read_text()):
        command, _ = target(root, line.split())
        assert command is not root, f"{file.name}: there is no `flywheel {line}`"


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("-")}


def target(root: TyperGroup, words: list[str]) -> tuple[Any, list[str]]:
    """The command that is meant, and the words behind its name."""
    command: Any = root
    words = [ALIASES.get(words[0], words[0]), *words[1:]] if words else words
    while isinstance(command, TyperGroup) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_a_page_shows_can_be_typed(root: TyperGroup, page: Path) -> None:
    for line in command_lines(page.read_text()):
        words = shlex.split(re.sub(r"[\[\]…]|\\?\|", " ", line))
        command, rest = target(root, words)
        assert command is not root, f"{page.name}: there is no `flywheel {line}`"
        unknown = {word for word in rest if word.startswith("-") and word != "-"} - options(command) - OF_ALL
        assert not unknown, f"{page.name}: `flywheel {line}` has no {unknown}"


def test_the_page_lists_every_exit_code() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    table = page.split("| exit code |")[1].split("\n\n")[0]
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(",")}
    own = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert listed == own | {0, EXIT_INTERRUPTED, 128 + signal.SIGTERM, EXIT_UNREAD}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings_that_are_there(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / name).read_text() if name else page.read_text()
        headings = [
            re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)
        ]
        assert anchor in headings, f"{page.relative_to(ROOT)} links to {name}#{anchor}"


def test_every_file_in_the_table_of_promises_is_there() -> None:
    table = (ROOT / "decisions" / "promises.md").read_text()
    named = re.findall(r"`([\w./]+(?:\.py|/))`", table)
    assert len(named) > 15
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "flywheel" / name).exists(), name
