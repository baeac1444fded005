"""The names of models for clients: the list with the aliases, single models, and errors about names that are unknown.

Each function makes the status and body of a response from those of vLLM's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from flywheel.serving.server.alias_table import Target
from flywheel.serving.server.asgi import error_json

OWNER: Final = "flywheel"
"""`owned_by` of the aliases."""
_UNKNOWN: Final = re.compile(r"The model `(.*)` does not exist", re.DOTALL)


def listed(
    status: int, body: bytes, targets: Mapping[str, Target], created: int, may_ask: Callable[[str], bool], wanted: str
) -> tuple[int, bytes]:
    """The list of the models that the client `may_ask` for, with the aliases; or of these the `wanted` one, if any.

    `created` is the creation time of aliases in seconds since 1970.
    """
    try:
        found = json.loads(body)
        cards: list[dict[str, Any]] = [card for card in found["data"] if may_ask(card["id"])]
    except (ValueError, KeyError, TypeError):
        return status, body
    cards += [
        {"id": alias, "object": "model", "created": created, "owned_by": OWNER, "root": target.name}
        for alias, target in targets.items()
    ]
    if not wanted:
        return status, json.dumps({**found, "data": cards}).encode()
    card = next((card for card in cards if card["id"] == wanted), None)
    return (status, json.dumps(card).encode()) if card else (404, error_json(404, unknown_model(wanted, targets)))


def unknown_model(model: str, aliases: Collection[str]) -> str:
    return f"The model `{model[:100]}` does not exist. This server answers as {', '.join(aliases)}."


def not_found(status: int, body: bytes, aliases: Collection[str]) -> tuple[int, bytes]:
    """An answer of 404 or 405 in OpenAI's form. The text about an unknown model names the aliases."""
    try:
        found = json.loads(body)
        error = found["error"]
        if unknown := _UNKNOWN.match(error["message"]):
            error["message"] = unknown_model(unknown[1], aliases)
        return status, json.dumps(found).encode()
    except (ValueError, KeyError, TypeError):  # of the web framework, for a path that vLLM does not have
        why = "this server has no such path" if status == 404 else "this path does not take the method"
        return status, error_json(status, why)
