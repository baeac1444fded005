"""The Python files of users' code: how settings name a function, and what a file imports from its folder.

Nothing is run, and only the standard library is imported: the user's interpreter imports this module, too.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class FunctionName(NamedTuple):
    """`where` is a file or a module; `mark` is `:` for a function, `->` for a class."""

    where: str
    mark: str
    name: str

    @property
    def is_class(self) -> bool:
        return self.mark == "->"

    @property
    def is_in_file(self) -> bool:
        """Whether `where` is a path, not a module."""
        return self.where.endswith(".py")

    def __str__(self) -> str:
        return "".join(self)


def parsed(text: str) -> FunctionName | None:
    """The parts of a name; None if it is of another form."""
    found = re.fullmatch(r"(?P<where>.+?)(?P<mark>:|->)(?P<name>\w+)", text, re.DOTALL)
    return FunctionName(*found.group("where", "mark", "name")) if found is not None else None


def code_files(functions: Iterable[str], command: Sequence[str], folder: Path) -> set[Path]:
    """The files of a user's code: those of `functions`, those that a `command` names, and what these import from
    their own folder or from the working directory `folder`.

    What cannot be read is left out: it cannot be run either.
    """
    names = [each for each in map(parsed, functions) if each is not None]
    modules = [each.where for each in names if not each.is_in_file]
    modules += [f"{module}.__main__" for option, module in itertools.pairwise(command) if option == "-m"]
    # Other files that a command names are data, which each run may change.
    scripts = [*command[:1], *(each for each in command if each.endswith((".py", ".sh")))]
    named = [folder / each for each in (*(each.where for each in names if each.is_in_file), *scripts)]
    named += [file for module in modules for file in _files_named(folder, module)]
    found: set[Path] = set()
    for file in named:
        # An argument of a command may be no path at all.
        with suppress(OSError, ValueError):
            if file.is_file():
                imported = imported_modules(file, file.parent, folder).values() if file.suffix == ".py" else ()
                found.update(each for each in (file, *imported) if os.access(each, os.R_OK))
    return found


def imported_modules(path: Path, folder: Path, *others: Path) -> dict[str, Path]:
    """The modules of a folder, or of others, that a Python file imports, itself or by another, by their names from
    that folder.

    Nothing is run: an import is looked up beside its file and in the folders, also one in a function. A module that
    cannot be parsed has no imports; it cannot be loaded either.
    """
    found: dict[str, Path] = {}
    left = [path]
    while left:
        file = left.pop()
        with suppress(OSError, SyntaxError, ValueError, IndexError, RecursionError):
            nodes = ast.walk(ast.parse(file.read_bytes()))
            for start, name in (each for node in nodes for each in _imports(node, file, (folder, *others))):
                for module in _files_named(start, name):
                    shown = os.path.relpath(module, folder)
                    if shown not in found and module != path:
                        found[shown] = module
                        left.append(module)
    return found


def outside_imports(file: Path, *folders: Path) -> set[str]:
    """The top-level modules that a Python file imports when it runs, also in a function, and that lie neither beside
    it nor in the folders. Raises OSError, SyntaxError and ValueError."""
    found: set[str] = set()
    own: set[str] = set()
    for node in _of_runs(ast.parse(file.read_bytes(), str(file))):
        if not (isinstance(node, ast.ImportFrom) and node.level):
            for start, name in _imports(node, file, folders):
                (own if any(_files_named(start, name)) else found).add(name.partition(".")[0])
    return found - own


def _of_runs(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without what stands below `if TYPE_CHECKING`: only type checkers read that."""
    left = [node]
    while left:
        yield (node := left.pop())
        test = node.test if isinstance(node, ast.If) else None
        is_of_types = getattr(test, "attr", getattr(test, "id", "")) == "TYPE_CHECKING"
        left += node.orelse if isinstance(node, ast.If) and is_of_types else ast.iter_child_nodes(node)


def _imports(node: ast.AST, file: Path, folders: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """What a statement imports: folders to look in, and dotted names of modules or of what they hold."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        package, level = ([node.module or ""], node.level) if isinstance(node, ast.ImportFrom) else ([], 0)
        root = next((each for each in file.parents if not (each / "__init__.py").exists()), file.parent)
        starts = [file.parents[level - 1]] if level else list(dict.fromkeys([file.parent, root, *folders]))
        for alias in node.names:
            name = ".".join(part for part in (*package, alias.name) if part)
            # What runs the code has this package already, and knows its version.
            if level or name.partition(".")[0] != "flywheel":
                yield from ((start, name) for start in starts)


def _files_named(start: Path, name: str) -> Iterator[Path]:
    """The files of a dotted module below a folder, and those of the packages that it is in."""
    for part in itertools.accumulate(filter(None, name.split(".")), "{}/{}".format):
        stem = start / part
        yield from filter(Path.is_file, (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"))
