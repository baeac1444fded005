"""Replaces an alias in the `model` of a request's JSON, and sets `request_id`. All other bytes stay unchanged.

A body is parsed once, in linear time for any input.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator
from json.decoder import JSONDecodeError
from typing import Final, NamedTuple

from flywheel.serving.asgi import RefusedError

MAX_DEPTH: Final = 100
"""Maximum nesting depth. vLLM and chat templates recurse through objects and lists, and fail with a 500 at Python's
recursion limit."""
MAX_MODEL_KEYS: Final = 4
"""Maximum number of `model` keys; the last one counts."""
MAX_KEYS: Final = 1000
"""Maximum number of top-level keys: each takes a step of Python on the server's event loop."""

_value = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\n\r]*").match
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""An unterminated string also matches; otherwise the search would restart at every quotation mark within it."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


class Rewritten(NamedTuple):
    """`target` is the target of the alias in the request, None without an alias."""

    body: bytes
    target: str | None


def rewrite_model(
    body: bytes, resolve: Callable[[str], str | None], request_id: Callable[[str], str] | None = None
) -> Rewritten:
    """`body` with the top-level `model` of its JSON object replaced if `resolve` returns another name.

    With `request_id`, a request to an alias gets the `request_id` that it returns for the target.

    Bodies that are not a JSON object are returned unchanged; the server refuses them. The same encodings as the
    server's are supported. Raises RefusedError for an object that is nested too deeply or has too many keys.
    """
    encoding = json.detect_encoding(body)
    try:
        text = body.decode(encoding, "surrogatepass")
    except ValueError:
        return Rewritten(body, None)
    if depth(text) > MAX_DEPTH:
        raise RefusedError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    try:
        found = list(_values(text, ("model", "request_id")))
    except (ValueError, IndexError):
        return Rewritten(body, None)
    targets = [resolve(value) if isinstance(value, str) else None for key, _, _, value in found if key == "model"]
    if all(target is None for target in targets):
        return Rewritten(body, None)
    target = targets[-1]
    new_id = request_id(target) if request_id and target is not None else None
    parts, kept = [], 0
    if new_id is not None and all(key != "request_id" for key, *_ in found):
        kept = text.index("{") + 1
        parts = [text[:kept], f'"request_id": {json.dumps(new_id)}, ']
    models = iter(targets)
    for key, start, end, _ in found:
        value = next(models) if key == "model" else new_id
        if value is not None:
            parts += [text[kept:start], json.dumps(value)]
            kept = end
    return Rewritten("".join([*parts, text[kept:]]).encode(encoding, "surrogatepass"), target)


def depth(text: str) -> int:
    """The nesting depth of a JSON text."""
    brackets = _STRING.sub("", text).encode("ascii", "ignore").translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(array("b", brackets.translate(_STEPS))), default=0)


def _values(text: str, wanted: Collection[str]) -> Iterator[tuple[str, int, int, object]]:
    """Key, positions and value of the top-level values with these keys.

    Raises JSONDecodeError or IndexError if the text is not one JSON object.
    """
    at = _skip(text, 0)
    if text[at] != "{":
        return
    at = _skip(text, at + 1)
    keys = models = 0
    while text[at] != "}":
        if text[at] != '"':
            raise JSONDecodeError("expected a key", text, at)
        key, at = _value(text, at)
        at = _skip(text, at)
        if text[at] != ":":
            raise JSONDecodeError("expected a colon", text, at)
        start = _skip(text, at + 1)
        value, end = _value(text, start)
        keys += 1
        models += key == "model"
        if models > MAX_MODEL_KEYS or keys > MAX_KEYS:
            more = f"{MAX_MODEL_KEYS} `model` keys" if models > MAX_MODEL_KEYS else f"{MAX_KEYS:,} keys"
            raise RefusedError(400, f"the body has more than {more}")
        if key in wanted:
            yield key, start, end, value
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _space(text, at)
    return found.end() if found else at
