"""Replaces an alias in the `model` of a request's JSON, and sets `request_id`. All other bytes stay unchanged.

Time is linear for any input, and little more than reading it once: other values are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, NamedTuple

from flywheel.serving.calls.request_parts import JsonScan, TooComplexError
from flywheel.system.server_limits import RefusedError

MAX_MODEL_KEYS: Final = 4
"""Maximum number of `model` keys; the last one counts."""
MAX_KEYS: Final = 1000
"""Maximum number of top-level keys: each takes a step of Python on the server's event loop."""


class Rewritten(NamedTuple):
    """`target` is the target of the alias in the request, None without an alias."""

    body: bytes
    target: str | None


def rewrite_model(
    body: bytes, resolve: Callable[[str], str | None], request_id: Callable[[str], str] | None = None
) -> Rewritten:
    """`body` with the top-level `model` of its JSON object replaced if `resolve` returns another name.

    With `request_id`, a request to an alias gets the `request_id` that it returns for the target.

    Bodies that are not a JSON object in one of the server's encodings are returned unchanged, or with the target's
    name; the server refuses them. Raises RefusedError for a body that is nested too deeply, or has too many keys,
    objects or lists.
    """
    encoding = json.detect_encoding(body)
    try:
        text = body.decode(encoding, "surrogatepass")
        found = _members(text)
        targets = [_target(text, start, resolve) for key, start, _ in found if key == "model"]
    except TooComplexError as error:
        raise RefusedError(400, f"the body {error}") from None
    except (ValueError, IndexError):
        return Rewritten(body, None)
    if all(target is None for target in targets):
        return Rewritten(body, None)
    target = targets[-1]
    new_id = request_id(target) if request_id and target is not None else None
    parts, kept = [], 0
    if new_id is not None and all(key != "request_id" for key, *_ in found):
        kept = text.index("{") + 1
        parts = [text[:kept], f'"request_id": {json.dumps(new_id)}, ']
    models = iter(targets)
    for key, start, end in found:
        value = next(models) if key == "model" else new_id
        if value is not None:
            parts += [text[kept:start], json.dumps(value)]
            kept = end
    return Rewritten("".join([*parts, text[kept:]]).encode(encoding, "surrogatepass"), target)


def _members(text: str) -> list[tuple[str, int, int]]:
    """Key, start and end of the top-level values `model` and `request_id`."""
    found = []
    models = 0
    for count, (key, start, end) in enumerate(JsonScan(text).members(), 1):
        models += key == "model"
        if models > MAX_MODEL_KEYS or count > MAX_KEYS:
            more = f"{MAX_MODEL_KEYS} `model` keys" if models > MAX_MODEL_KEYS else f"{MAX_KEYS:,} keys"
            raise TooComplexError(f"has more than {more}")
        if key in ("model", "request_id"):
            found.append((key, start, end))
    return found


def _target(text: str, start: int, resolve: Callable[[str], str | None]) -> str | None:
    return resolve(json.JSONDecoder().raw_decode(text, start)[0]) if text[start] == '"' else None
