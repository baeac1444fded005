"""YAML that people write: read, checked against a model, and explained when it is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, Tag, ValidationError
from pydantic.json_schema import SkipJsonSchema

from flywheel.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML as people and programs write it."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = str(super().construct_scalar(node))
        try:
            # JSON writes some characters as two halves, which are put together; one half alone is no character.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise yaml.constructor.ConstructorError(
                problem="half of a character stands alone", problem_mark=node.start_mark
            ) from None


def read_yaml(path: Path, attempted: str, if_missing: str, *, keys_once: bool = False) -> Any:
    """What a file holds. Raises ConfigError; `if_missing` is the remedy when there is no such file.

    With `keys_once` a key that a mapping has twice is an error: of two sections, YAML would keep only the last one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.load(text, _Loader)
        twice = list(Places(text).duplicates()) if keys_once else []
    except FileNotFoundError:
        raise ConfigError(attempted, "there is no such file", if_missing) from None
    except OSError as error:
        raise ConfigError(attempted, error.strerror or str(error), "Check the path and its permissions.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(attempted, "it is not UTF-8 text", "Name a YAML file.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        # ValueError: a date or number that looks like one and is none.
        raise ConfigError(attempted, f"it is not YAML: {_problem(error)}", "Correct the file.") from error
    if twice:
        told = (
            f"`{'.'.join(map(str, key))}` is written twice, on line {first.line} and on line {again.line}"
            for key, again, first in twice
        )
        raise ConfigError(attempted, "; ".join(told), "Keep one of them, with what both say.")
    return found


def _problem(error: Exception) -> str:
    """What is wrong and where, without the parser's picture of the line, for which a message has no room."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        told = f"{error.context}, {error.problem}" if error.context else error.problem
        return f"line {mark.line + 1}, column {mark.column + 1}: {told}"
    return " ".join(str(error).split())


def explain(error: ValidationError, model: type[BaseModel], places: Places | None = None) -> str:
    """Each problem with the path of its key; for an unknown key, the name that may have been meant.

    `places` are those of the text that was read: each problem then begins with its line.
    """
    # A default that is made of other keys is not wrong where those are.
    own = [item for item in error.errors() if item["type"] != "default_factory_not_called"]
    return "; ".join(_line_of(item, model, places) + explain_one(dict(item), model) for item in own)


def _line_of(item: Any, model: type[BaseModel], places: Places | None) -> str:
    path = [int(part) if part.isdecimal() else part for part in _locate(model, item["loc"])[0]]
    if places is None or not path:
        return ""
    return f"line {places.of(path, key=item['type'] == 'extra_forbidden').line}: "


def explain_one(item: dict[str, Any], model: type[BaseModel]) -> str:
    """One problem of a ValidationError, as it lists them."""
    location, known = _locate(model, item["loc"])
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(location[-1], known, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(known)}"
        return f"unknown key `{key}` ({meant})"
    if item["type"] == "union_tag_invalid":
        tags = item["ctx"]["expected_tags"].replace("'", "`")
        return f"`{key}.type`: there is no type `{item['ctx']['tag']}`; it is one of {tags}"
    message = item["msg"].removeprefix("Value error, ")
    return f"`{key}`: {message[:1].lower()}{message[1:]}" if key else message


def _locate(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The path of a key as the user wrote it (without the tags of unions), and the keys that are known there."""
    path: list[str] = []
    current: type[BaseModel] | None = model
    choices: dict[str, type[BaseModel]] = {}
    known: list[str] = []
    for part in location:
        if part in choices:
            current, choices = choices[str(part)], {}
            continue
        path.append(str(part))
        if isinstance(part, int):
            continue
        known = _written(current) if current else []
        field = current.model_fields.get(part) if current else None
        found = sections_in(field.annotation) if field else {}
        current = next(iter(found.values()), None)
        choices = found if len(found) > 1 else {}
    return path, known


def _written(model: type[BaseModel]) -> list[str]:
    """The keys that people may write: a model can have some that only the program fills in."""
    return sorted(
        name
        for name, field in model.model_fields.items()
        # Type checkers are shown an alias.
        if not any(isinstance(mark, SkipJsonSchema) for mark in field.metadata)  # type: ignore[misc]
    )


def sections_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models inside an annotation (a model, a list of models, a tagged union of models) by their tags."""
    found: dict[str, type[BaseModel]] = {}
    waiting, tag = [(annotation, "")], ""
    while waiting:
        candidate, tag = waiting.pop(0)
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            found[tag] = candidate
            continue
        own = next((m.tag for m in getattr(candidate, "__metadata__", ()) if isinstance(m, Tag)), tag)
        waiting += [(inner, own) for inner in getattr(candidate, "__args__", ())]
    return found


class Place(NamedTuple):
    """Line and column, counted from 1."""

    line: int
    column: int


START = Place(1, 1)
_Path = tuple[int | str, ...]


class Places:
    """The places of the keys and values of one YAML text. Raises yaml.YAMLError for a text that is none."""

    def __init__(self, text: str) -> None:
        self._root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)

    def of(self, path: Sequence[int | str], *, key: bool = False) -> Place:
        """Where the value at a path stands, or with `key` its key; the nearest part that is written, if it is not."""
        node, found = self._root, self._root
        for depth, part in enumerate(path):
            pair = _child(node, part)
            if pair is None:
                break
            name, node = pair
            found = name if key and depth == len(path) - 1 else node
        return START if found is None else _place(found)

    def in_scalar(self, path: Sequence[int | str], offset: int) -> Place:
        """The place of a character inside a text on one line; of the text itself where that cannot be told."""
        node = self._root
        for part in path:
            if (pair := _child(node, part)) is None:
                break
            node = pair[1]
        start = self.of(path)
        if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
            return start
        if node.style is None or (node.style == "'" and "'" not in node.value[:offset]):
            return Place(start.line, start.column + offset + (node.style is not None))
        return start

    def duplicates(self) -> Iterator[tuple[_Path, Place, Place]]:
        """Keys that a mapping has twice: the path, the second place and the first."""
        waiting: list[tuple[_Path, yaml.Node | None]] = [((), self._root)]
        seen: set[int] = set()
        while waiting:
            path, node = waiting.pop(0)
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += [((*path, place), item) for place, item in enumerate(node.value)]
            elif isinstance(node, yaml.MappingNode):
                first: dict[tuple[str, str], Place] = {}
                for name, value in node.value:
                    waiting.append(((*path, str(name.value)), value))
                    if not isinstance(name, yaml.ScalarNode) or name.tag == "tag:yaml.org,2002:merge":
                        continue
                    at = first.setdefault((name.tag, name.value), _place(name))
                    if at != _place(name):
                        yield (*path, name.value), _place(name), at


def _child(node: yaml.Node | None, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    """The key (of an item: itself) and the value."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    if isinstance(node, yaml.MappingNode):
        # The last one of a name: that is what the text means when it is read.
        return next(((name, value) for name, value in reversed(node.value) if name.value == str(part)), None)
    return None


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)
