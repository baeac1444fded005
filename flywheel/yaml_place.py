"""Where the keys of a YAML text stand, for messages that an editor can jump to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import yaml


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
