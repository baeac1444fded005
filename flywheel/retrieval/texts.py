"""What is compared: the text of a conversation and the text of a tool. Plain text, without models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from flywheel.errors import ConfigError
from flywheel.records.similarity import terms
from flywheel.records.tool_calls import functions_by_name
from flywheel.records.trace import ChatMessage, ToolDefinition, is_reminder
from flywheel.training.data.rollout import text_of

MOST_CHARACTERS: Final = 2_000
"""Of a conversation. Encoders read a few hundred tokens, and old messages say little about the next call."""
MOST_MESSAGES: Final = 8
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def query_texts(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """What the user and the assistant said so far, the newest first. `messages` have the OpenAI chat form.

    System prompts and the reminders of frameworks are the same in every conversation, and results of tools mostly
    repeat what was asked for: they are left out.
    """
    found: list[str] = []
    room = MOST_CHARACTERS
    for message in reversed(messages):
        text = text_of(message.get("content")).strip() if message.get("role") in ("user", "assistant") else ""
        if text and not is_reminder(text):
            found.append(text[:room])
            room -= len(text)
        if room <= 0 or len(found) == MOST_MESSAGES:
            break
    return tuple(found)


def encoded_query(texts: Sequence[str]) -> str:
    """What an encoder reads. It cuts off the end, which is the oldest."""
    return "\n".join(texts)


def tool_text(function: Mapping[str, Any]) -> str:
    """The words of a function's name, its description, and its parameters with theirs."""
    found = [_spaced_name(str(function.get("name"))), _string(function.get("description"))]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name, about in (properties if isinstance(properties, Mapping) else {}).items():
        found.append(
            f"{_spaced_name(name)} {_string(about.get('description') if isinstance(about, Mapping) else '')}"
        )
    return "\n".join(text.strip() for text in found if text.strip())


def _spaced_name(name: str) -> str:
    return " ".join(re.split(r"[\W_]+", _CAMEL.sub(" ", name)))


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def words_of(text: str) -> list[str]:
    """The words that BM25 counts, in lower case; of scripts without spaces, pairs of characters."""
    return terms(_CAMEL.sub(" ", text))


def tools_by_name(tools: Iterable[ToolDefinition]) -> dict[str, ToolDefinition]:
    """Tools by the names of their functions; of two with the same name, the last. Raises ConfigError."""
    found: dict[str, ToolDefinition] = {}
    for number, tool in enumerate(tools, 1):
        names = functions_by_name((tool,)) if isinstance(tool, Mapping) else {}
        if not names:
            hint = 'Give definitions in the OpenAI chat form: {"type": "function", "function": {"name": …}}.'
            raise ConfigError("index tools", f"tool {number} has no name", hint)
        found[next(iter(names))] = tool
    return found
