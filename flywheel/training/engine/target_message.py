"""A recorded message of the model as a target of training: what it says, and what of that a rendered text lacks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from flywheel.records.tool_calls import arguments_text
from flywheel.records.trace import ChatMessage, ToolCall, get_path, reasoning_of

_TAGGED: Final = re.compile(r"\s*<think>(.*?)</think>(.*)\Z", re.DOTALL)
_OURS: Final = frozenset({"weight", "reasoning", "reasoning_content", "thinking", "reasoning_sent"})
"""Keys of a message that say what is trained, and those of the reasoning."""


class NoSampleError(Exception):
    """A recorded reply that cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A message of the model. `calls` are names with parsed arguments; `rest` are its other keys, as recorded."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, Any], ...]
    rest: ChatMessage

    @classmethod
    def of(cls, message: ChatMessage) -> Self:
        """Reasoning in tags at the beginning of the text is no part of it. Raises NoSampleError for a message that
        says nothing, and for calls whose arguments are no JSON object."""
        text, reasoning, calls = str(message.get("content") or ""), reasoning_of(message), []
        if not reasoning and (tagged := _TAGGED.match(text)) is not None:
            reasoning, text = tagged[1].strip(), tagged[2].lstrip()
        for call in message.get("tool_calls") or ():
            name, arguments = str(get_path(call, "function", "name")), arguments_of(call)
            if arguments is None:
                raise NoSampleError(f"the arguments of its call of {name} are no JSON object")
            calls.append((name, arguments))
        if not (text.strip() or reasoning.strip() or calls):
            raise NoSampleError("a message of the model says nothing")
        return cls(text, reasoning, tuple(calls), {key: message[key] for key in message.keys() - _OURS})

    @property
    def message(self) -> ChatMessage:
        """It as a server gets it."""
        given = self.rest.get("tool_calls") or ()
        calls = [_with(call, *called) for call, called in zip(given, self.calls, strict=True)]
        return {
            **self.rest,
            "content": self.text or (self.rest.get("content") and ""),
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning": self.reasoning} if self.reasoning else {}),
        }

    @property
    def without_reasoning(self) -> Self:
        return replace(self, reasoning="")

    @property
    def forms(self) -> list[tuple[Self, str]]:
        """The forms in which a template may write it, the best one first: with its reasoning under a key, with its
        text as recorded, of which tags with the reasoning may be a part, and without its reasoning. Where the part
        beside a form is missing, the next one is tried."""
        if not self.reasoning:
            return [(self, "")]
        text = str(self.rest.get("content") or "")
        tagged = [(replace(self, text=text, reasoning=""), "text")] if text != self.text else []
        return [(self, "reasoning"), *tagged, (self.without_reasoning, "")]

    @property
    def strings(self) -> Iterator[str]:
        """All texts in it, those of the arguments decoded."""
        yield from (self.text, self.reasoning)
        # Some templates write the ids of calls.
        yield from (str(call.get("id") or "") for call in self.rest.get("tool_calls") or ())
        for name, arguments in self.calls:
            yield name
            yield from (each for each in _leaves(arguments) if isinstance(each, str))

    def marked(self, *, reasoning: bool) -> Self:
        """A message of the same form whose texts and numbers are each there only once."""
        numbers = itertools.count(734_000)

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return f"mark{next(numbers)}x" if value.strip() else value
            return value if isinstance(value, bool | None) else type(value)(next(numbers))

        calls = tuple((name, _mapped(arguments, mark)) for name, arguments in self.calls)
        return replace(self, text=mark(self.text), reasoning=mark("a") if reasoning else "", calls=calls)

    def missing_in(self, written: str) -> str:
        """The first part that a text does not have: `text`, `calls` or `reasoning`; empty if it has all."""
        if self.reasoning.strip() not in written:
            return "reasoning"
        if self.text.strip() not in written:
            return "text"
        for name, arguments in self.calls:
            if name not in written or not all(_is_in(each, written) for each in _leaves(arguments)):
                return "calls"
        return ""


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object."""
    try:
        value = json.loads(arguments_text(get_path(call, "function", "arguments")))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_context(message: ChatMessage) -> ChatMessage:
    """A message of a reply as the agent sends it with its next request."""
    shown = {key: value for key, value in message.items() if key not in _OURS}
    if message.get("reasoning_sent", True) and (reasoning := reasoning_of(message)):
        shown["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        parsed = [(call, arguments_of(call)) for call in calls]
        shown["tool_calls"] = [
            call if arguments is None else _with(call, call["function"]["name"], arguments)
            for call, arguments in parsed
        ]
    return shown


def _with(call: ToolCall, name: str, arguments: dict[str, Any]) -> ToolCall:
    return {**call, "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of JSON with its leaves changed."""
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list) else change(value)


def _leaves(value: Any) -> Iterator[Any]:
    """The names and the leaves of a value of JSON."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _is_in(value: Any, written: str) -> bool:
    """Whether a leaf is in a text: as it is, as JSON, or as Python writes it."""
    if isinstance(value, str):
        forms = (
            value.strip(),
            *(json.dumps(value, ensure_ascii=flag)[1:-1] for flag in (False, True)),
            repr(value)[1:-1],
        )
    else:
        forms = json.dumps(value), str(value)
    return any(form in written for form in forms)
