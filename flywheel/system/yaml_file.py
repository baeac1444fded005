"""YAML files: read, with the position of every key, and what is wrong with them in words for the user."""

from __future__ import annotations

import difflib
import errno
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, Tag, ValidationError
from pydantic.json_schema import SkipJsonSchema

from flywheel.errors import ConfigError
from flywheel.system.files import read_given

MAX_VALUES: Final = 100_000
"""Values of a document, where an alias and a merge (`<<`) count as what they stand for."""
MAX_DEPTH: Final = 64
"""How deep values may be nested, through aliases as well."""
MAX_NUMBER: Final = 100
"""Characters of a number. Python takes as long as it likes for a number in base 60 (`1:30:00`)."""
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
MAX_PROBLEMS: Final = 50
"""Problems of a file that are named; each is looked for in all of it."""
_SYNONYMS: Final = {"rank": "r"}
"""Names under which users look for a key that is spelt quite differently."""
_SHOWN_TEXTS: Final = ("int_parsing", "float_parsing", "bool_parsing", "literal_error", "enum")
MAX_SHOWN: Final = 40
"""Characters of a wrong value that a message quotes."""
_RULES: Final = {
    "missing": "it is required",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
    "finite_number": "it must be a finite number",
    "greater_than": "it must be above {gt}",
    "greater_than_equal": "it must be {ge} or more",
    "less_than": "it must be below {lt}",
    "less_than_equal": "it must be {le} or less",
    "too_short": "it must have {min_length} or more items",
    "too_long": "it must have {max_length} or fewer items",
    "string_too_short": "it must have {min_length} or more characters",
    "string_too_long": "it must have {max_length} or fewer characters",
    "invalid_key": "a key must be a text",
    "path_type": "it must be a path",
    "string_type": "it must be a text",
    "int_parsing_size": "it must be a smaller number",
    "int": "it must be a whole number",
    "float": "it must be a number",
    "bool": "it must be true or false",
    "list": "it must be a list",
    "tuple": "it must be a list",
    "model": "it must be a mapping of keys to values",
    "dict": "it must be a mapping of keys to values",
    "none_required": "it must be null",
}
"""What the program requires, by pydantic's error type or its first word; its messages are about Python."""


class Position(NamedTuple):
    """Line and column, counted from 1."""

    line: int
    column: int


START: Final = Position(1, 1)
PLAIN: Final = "plain"
"""The tag of values that are no model, in a union with one."""
KeyPath = tuple[int | str, ...]


class LimitError(yaml.MarkedYAMLError):
    """A document that exceeds the limits, and where."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        _check_limits(self._nodes, self._depth, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
                raise ValueError(f"a number has more than {MAX_NUMBER} characters")
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # What the library raises for a value that its tag does not allow, such as `!!int ""`.
            why = (
                str(error) if isinstance(error, ValueError) else f"it cannot be read as {node.tag.rpartition(':')[2]}"
            )
            raise yaml.constructor.ConstructorError(problem=why, problem_mark=node.start_mark) from error

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text = str(super().construct_scalar(node))
        try:
            # JSON writes some characters as two surrogates, which are joined here. One alone is no character.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise yaml.constructor.ConstructorError(
                problem="half of a character stands alone", problem_mark=node.start_mark
            ) from None


class YamlDocument:
    """A YAML text: its `value`, the positions of its keys, and the keys that a mapping has twice.

    Raises yaml.YAMLError for invalid YAML, and LimitError.
    """

    def __init__(self, text: str) -> None:
        loader = _Loader(text)
        try:
            self._root: yaml.Node | None = loader.get_single_node()
            _check_expanded(self._root)
            # Before the value is built, which puts the keys of merged mappings (`<<`) into the nodes.
            self.duplicates = list(self._duplicates())
            self.value = None if self._root is None else loader.construct_document(self._root)
        finally:
            loader.dispose()

    def position(self, path: Sequence[int | str], *, key: bool = False) -> Position:
        """Where the value at a path is, or with `key` its key; for a part that is not there, where its parent is."""
        node, found = self._root, self._root
        for depth, part in enumerate(path):
            pair = _child(node, part)
            if pair is None:
                break
            name, node = pair
            found = name if key and depth == len(path) - 1 else node
        return START if found is None else _start(found)

    def position_in_text(self, path: Sequence[int | str], offset: int) -> Position:
        """Where a character of a text is; the position of the text if it has several lines or escapes."""
        node = self._root
        for part in path:
            if (pair := _child(node, part)) is None:
                break
            node = pair[1]
        start = self.position(path)
        if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
            return start
        if node.style is None or (node.style == "'" and "'" not in node.value[:offset]):
            return Position(start.line, start.column + offset + (node.style is not None))
        return start

    def _duplicates(self) -> Iterator[tuple[KeyPath, Position, Position]]:
        """The path of each key that a mapping has twice, its second position and its first."""
        waiting: deque[tuple[KeyPath, yaml.Node | None]] = deque([((), self._root)])
        visited: set[int] = set()
        while waiting:
            path, node = waiting.popleft()
            if node is None or id(node) in visited:
                continue
            visited.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += [((*path, index), item) for index, item in enumerate(node.value)]
            elif isinstance(node, yaml.MappingNode):
                first: dict[tuple[str, str], yaml.Node] = {}
                for name, value in node.value:
                    waiting.append(((*path, str(name.value)), value))
                    if not isinstance(name, yaml.ScalarNode) or name.tag == "tag:yaml.org,2002:merge":
                        continue
                    if (earlier := first.setdefault((name.tag, name.value), name)) is not name:
                        yield (*path, name.value), _start(name), _start(earlier)


def _check_limits(values: int, depth: int, mark: yaml.Mark) -> None:
    if values > MAX_VALUES:
        why = f"the file has more than {MAX_VALUES:,} values, those of aliases and merges included"
        raise LimitError(problem=why, problem_mark=mark)
    if depth > MAX_DEPTH:
        raise LimitError(problem=f"the file is nested deeper than {MAX_DEPTH} levels", problem_mark=mark)


def _check_expanded(root: yaml.Node | None) -> None:
    """Raises LimitError if the document exceeds the limits when each alias is replaced by what it stands for."""
    sizes: dict[int, tuple[int, int]] = {}

    def measured(node: Any, level: int) -> tuple[int, int]:
        """Values and levels of a node. One that contains itself has no end, and is found at the lowest level."""
        values, depth = sizes.get(id(node), (1, 1))
        if id(node) not in sizes and isinstance(node, yaml.CollectionNode):
            _check_limits(values, level, node.start_mark)
            for each in node.value:
                for child in each if isinstance(each, tuple) else (each,):
                    inner, levels = measured(child, level + 1)
                    values, depth = values + inner, max(depth, levels + 1)
            sizes[id(node)] = values, depth
        _check_limits(values, level + depth - 1, node.start_mark)
        return values, depth

    if root is not None:
        measured(root, 1)


def _child(node: yaml.Node | None, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    """Key and value; for an item of a list, the item twice."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    if isinstance(node, yaml.MappingNode):
        # Of two keys with the same name, the last one counts.
        return next(((name, value) for name, value in reversed(node.value) if name.value == str(part)), None)
    return None


def _start(node: yaml.Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def read_yaml(path: Path, attempted: str, if_missing: str, *, keys_once: bool = False) -> YamlDocument:
    """Read a YAML file. Raises ConfigError; `if_missing` is its remedy if there is no such file.

    With `keys_once`, a key that a mapping has twice is an error: YAML would keep only the last one.
    """
    try:
        document = YamlDocument(read_given(path).decode())
    except FileNotFoundError:
        raise ConfigError(attempted, "there is no such file", if_missing) from None
    except OSError as error:
        hint = "Shorten the file." if error.errno == errno.EFBIG else "Check the path and its permissions."
        raise ConfigError(attempted, error.strerror or str(error), hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(attempted, "it is not UTF-8 text", "Name a YAML file.") from error
    except LimitError as error:
        raise ConfigError(attempted, _yaml_problem(error), "Shorten the file.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(attempted, f"it is not YAML: {_yaml_problem(error)}", "Correct the file.") from error
    if keys_once and document.duplicates:
        twice = (
            f"`{'.'.join(map(str, key))}` is written twice, on line {first.line} and on line {second.line}"
            for key, second, first in document.duplicates
        )
        raise ConfigError(attempted, "; ".join(twice), "Keep one of them, with the settings of both.")
    return document


def yaml_value(text: str, attempted: str, hint: str) -> Any:
    """The value of a YAML text. Raises ConfigError."""
    try:
        return YamlDocument(text).value
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(attempted, f"its value is not YAML: {_yaml_problem(error)}", hint) from error


def _yaml_problem(error: Exception) -> str:
    """The problem and its position, on one line and without the excerpt that the parser adds."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = f"{error.context}, {error.problem}" if error.context else error.problem
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}"
    return " ".join(str(error).split())


def is_among(key: str, keys: Collection[str]) -> bool:
    """Whether one of these dotted keys is this one, above it, or below it."""
    return any(f"{key}.".startswith(f"{each}.") or f"{each}.".startswith(f"{key}.") for each in keys)


def explain(
    error: ValidationError,
    model: type[BaseModel],
    document: YamlDocument | None = None,
    *,
    below: KeyPath = (),
    elsewhere: Collection[str] = (),
) -> str:
    """All problems of a ValidationError, each with the path of its key and, with a document, its line.

    What was validated stands in the document at `below`; the keys `elsewhere` are not from it.
    """
    problems = []
    for item in error.errors()[:MAX_PROBLEMS]:
        # A default that depends on other keys fails when those do, and is no problem of its own.
        if item["type"] == "default_factory_not_called":
            continue
        path = path_of(dict(item), model)
        is_unknown = item["type"] == "extra_forbidden"
        place = (*below, *path)
        is_there = document is not None and place and not is_among(".".join(map(str, path)), elsewhere)
        line = f"line {document.position(place, key=is_unknown).line}: " if document and is_there else ""
        problems.append(line + explain_one(dict(item), model))
    if (left := error.error_count() - MAX_PROBLEMS) > 0:
        problems.append(f"and {left} more")
    return "; ".join(problems)


def explain_one(item: dict[str, Any], model: type[BaseModel]) -> str:
    """One problem of a ValidationError, as its `errors` lists them. Suggests a similar key for an unknown one."""
    location, known, of_another = _locate(model, item["loc"])
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        if of_another:
            return f"unknown key `{key}`: {of_another} has no {location[-1]}"
        given = _SYNONYMS.get(location[-1], location[-1])
        close = [given] if given in known else difflib.get_close_matches(location[-1], known, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(known)}"
        return f"unknown key `{key}` ({meant})"
    if item["type"] == "union_tag_invalid":
        given, tags = item["ctx"]["tag"], item["ctx"]["expected_tags"]
        close = difflib.get_close_matches(given, re.findall("'([^']+)'", tags), n=1)
        which = f" (did you mean `{close[0]}`?)" if close else "; it is one of {}".format(tags.replace("'", "`"))
        return f"`{key}.type`: there is no type `{given}`{which}"
    message = _problem(item)
    return f"`{key}`: {message[:1].lower()}{message[1:]}" if key else message


def _problem(item: dict[str, Any]) -> str:
    """What is wrong with a value. A validator's own message is used as it is."""
    kind = item["type"]
    rule = _RULES.get(kind) or _RULES.get(kind.partition("_")[0])
    if rule is None:
        return str(item["msg"].removeprefix("Value error, "))
    limits = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in (item.get("ctx") or {}).items()
    }
    value = item["input"]
    # A text in the place of something else may be a secret.
    is_shown = value is None or isinstance(value, int | float) or (isinstance(value, str) and kind in _SHOWN_TEXTS)
    given = "null" if value is None else str(value)
    shown = f", not `{given}`" if is_shown and len(given) <= MAX_SHOWN else ""
    return rule.format(**limits) + shown


def path_of(item: dict[str, Any], model: type[BaseModel]) -> KeyPath:
    """Where the user wrote what a problem of a ValidationError is about."""
    path = [int(part) if part.isdecimal() else part for part in _locate(model, item["loc"])[0]]
    return (*path, "type") if item["type"] == "union_tag_invalid" else tuple(path)


def _locate(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[str], str]:
    """The path of a key as the user wrote it (without the tags of unions), the keys that are known there, and the tag
    of the union that it is in, if another one of its models has the key."""
    path: list[str] = []
    current: type[BaseModel] | None = model
    choices: dict[str, type[BaseModel]] = {}
    known: list[str] = []
    is_name = False
    of_another = ""
    for part in location:
        if part in choices or (choices and part == PLAIN):
            if location[-2] == part and any(location[-1] in each.model_fields for each in choices.values()):
                of_another = str(part)
            current, choices = choices.get(str(part)), {}
            continue
        path.append(str(part))
        if isinstance(part, int) or is_name:
            is_name = False
            continue
        fields = current.model_fields if current else {}
        # Users cannot write keys that are hidden from the JSON Schema: only the program sets them.
        known = sorted(
            name
            for name, field in fields.items()
            if not any(isinstance(mark, SkipJsonSchema) for mark in field.metadata)  # type: ignore[misc] # an alias
        )
        field = fields.get(str(part))
        sections = sections_in(field.annotation) if field else {}
        current = next(iter(sections.values()), None)
        # Sections by name: the next part is a name.
        is_name = current is not None and field is not None and get_origin(field.annotation) is dict
        choices = {tag: section for tag, section in sections.items() if tag}
    return path, known, of_another


def sections_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models inside an annotation (a model, a list of models, a tagged union of models) by their tags: a tag is
    given, or the only value of the model's `type`."""
    sections: dict[str, type[BaseModel]] = {}
    waiting = [(annotation, "")]
    while waiting:
        candidate, tag = waiting.pop(0)
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            kind = candidate.model_fields.get("type")
            kinds = get_args(kind.annotation) if kind and get_origin(kind.annotation) is Literal else ()
            sections[tag or (kinds[0] if len(kinds) == 1 else "")] = candidate
            continue
        own = next((mark.tag for mark in getattr(candidate, "__metadata__", ()) if isinstance(mark, Tag)), tag)
        waiting += [(inner, own) for inner in getattr(candidate, "__args__", ())]
    return sections
