"""The words of each page, and the sentences that are too long: `python -m scripts.words [PAGE …]`.

Limits are in `scripts/word_limits.toml`. A page's words are counted as `wc -w` does. Sentences are those of
paragraphs, list items, headings and cells of tables; words of inline code count, code blocks do not. A colon or a
semicolon ends no sentence. With pages, only their sentences are checked. Ends with 1 where something is too long.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parent.parent
LIMITS: Final = Path(__file__).parent / "word_limits.toml"
MARKDOWN: Final = MarkdownIt("commonmark").enable("table")
HEADER: Final = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
ADMONITION: Final = re.compile(r'^(?:!!!|\?\?\?\+?) *\w*(?: "(.*)")?\n((?: {4}.*\n|\n)+)', re.MULTILINE)
# pysbd and syntok were tried on the pages: the one keeps "4 ms. A page" together, the other divides at semicolons.
END: Final = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)[.!?][\"'”’)\]]*\s+")


@dataclass(frozen=True)
class Limit:
    """At most so many words in the files that match."""

    name: str
    words: int
    files: tuple[str, ...]

    def pages(self, root: Path) -> list[Path]:
        return sorted({path for pattern in self.files for path in root.glob(pattern)})


@dataclass(frozen=True)
class Limits:
    longest_sentence: int
    limits: tuple[Limit, ...]

    def pages(self, root: Path) -> list[Path]:
        """Every page that a limit covers."""
        return sorted({page for limit in self.limits for page in limit.pages(root)})


def limits_of(text: str) -> Limits:
    raw: dict[str, Any] = tomllib.loads(text)
    found = (Limit(each["name"], each["words"], tuple(each["files"])) for each in raw["limit"])
    return Limits(raw["longest_sentence"], tuple(found))


def words_of(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, without markup."""
    text = HEADER.sub("", text)
    text = ADMONITION.sub(lambda found: f"{found[1] or ''}\n\n{textwrap.dedent(found[2])}", text)
    for block in MARKDOWN.parse(text):
        if block.type == "inline":
            for part in _plain(block.children or []).split("\n"):
                yield from filter(None, (each.strip() for each in END.split(part)))


def _plain(children: Sequence[Token]) -> str:
    """What a reader sees of a block. A forced line break, also `<br>`, ends a sentence."""
    shown = []
    for each in children:
        if each.type in ("text", "code_inline"):
            shown.append(each.content.replace("\n", " "))
        elif each.type == "softbreak":
            shown.append(" ")
        elif each.type == "hardbreak" or each.content.startswith("<br"):
            shown.append("\n")
    return "".join(shown)


def too_long(page: Path, most: int) -> list[tuple[int, str]]:
    """The sentences of more words than that, with their number of words. A sign alone, such as a dash, is no word."""
    counted = ((sum(map(_is_word, each.split())), each) for each in sentences(page.read_text(encoding="utf-8")))
    return [(count, each) for count, each in counted if count > most]


def _is_word(text: str) -> bool:
    return any(sign.isalnum() for sign in text)


def check(root: Path, limits: Limits, pages: Sequence[Path] = ()) -> list[str]:
    """Prints the table, and returns what is too long."""
    chosen = list(pages) or limits.pages(root)
    table = Table("page", "words", "limit", "sentences too long", box=None, header_style="bold")
    for name in ("words", "limit", "sentences too long"):
        next(column for column in table.columns if column.header == name).justify = "right"
    problems = []
    for page in chosen:
        name = page.resolve().relative_to(root.resolve()).as_posix()
        long = too_long(page, limits.longest_sentence)
        problems += [f"{name}: a sentence of {count} words: {text}" for count, text in long]
        table.add_row(name, f"{words_of(page):,}", "", str(len(long) or ""))
    for limit in () if pages else limits.limits:
        total = sum(map(words_of, limit.pages(root)))
        table.add_row(limit.name, f"{total:,}", f"{limit.words:,}", style="bold")
        if total > limit.words:
            problems.append(f"{limit.name}: {total:,} words, of {limit.words:,}")
    Console(width=120).print(table)
    return problems


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.words", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that has the pages")
    options = parser.parse_args(arguments)
    problems = check(options.root, limits_of(LIMITS.read_text(encoding="utf-8")), options.pages)
    print("\n".join(problems), file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
