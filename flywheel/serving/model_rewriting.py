"""The `model` of a request's JSON, replaced where it is an alias. Every other byte stays.

A body is parsed once, in time that grows with its length alone, whoever wrote it.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterator
from json.decoder import JSONDecodeError
from typing import Final, NamedTuple

from flywheel.serving.asgi import RefusedError

MAX_DEPTH: Final = 100
"""Objects and lists within each other. vLLM and the chat template walk through them recursively, and fail with a 500
where Python's stack ends."""
MAX_MODEL_KEYS: Final = 4
"""The last one counts; what several are good for, nobody knows."""
MAX_KEYS: Final = 1000
"""At the top level: each takes a step of Python on the server's event loop."""

_value = json.JSONDecoder().raw_decode
_space = re.compile(r"[ \t\n\r]*").match
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""One that has no end is a match too: else the search would begin again at every quotation mark within it."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


class Rewritten(NamedTuple):
    """`target` is what the alias stands for that the request names, None where it names none."""

    body: bytes
    target: str | None


def rewrite_model(body: bytes, resolve: Callable[[str], str | None]) -> Rewritten:
    """`body` with the top-level `model` of its JSON object replaced where `resolve` gives another name.

    What is not a JSON object is returned as it is; refusing it is the server's business. The encodings are those that
    the server reads as well. Raises RefusedError for an object that is nested too deeply or has too many keys.
    """
    encoding = json.detect_encoding(body)
    try:
        text = body.decode(encoding, "surrogatepass")
    except ValueError:
        return Rewritten(body, None)
    if depth(text) > MAX_DEPTH:
        raise RefusedError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    try:
        found = [
            (start, end, resolve(model) if isinstance(model, str) else None) for start, end, model in _models(text)
        ]
    except (ValueError, IndexError):
        return Rewritten(body, None)
    if all(target is None for _, _, target in found):
        return Rewritten(body, None)
    parts, kept = [], 0
    for start, end, target in found:
        if target is not None:
            parts += [text[kept:start], json.dumps(target)]
            kept = end
    whole = "".join([*parts, text[kept:]]).encode(encoding, "surrogatepass")
    return Rewritten(whole, found[-1][2])


def depth(text: str) -> int:
    """How deep objects and lists lie within each other in a JSON text."""
    brackets = _STRING.sub("", text).encode("ascii", "ignore").translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(array("b", brackets.translate(_STEPS))), default=0)


def _models(text: str) -> Iterator[tuple[int, int, object]]:
    """Where the values of top-level `model` keys lie, and what they say.

    Raises JSONDecodeError or IndexError where the text is not one JSON object.
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
        if key == "model":
            yield start, end, value
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _space(text, at)
    return found.end() if found else at
