"""The seven reasons for which AgentJet drops a task whatever `custom_rubrics` say, each as a required criterion."""

from __future__ import annotations

from typing import Any, Final

_STATEMENTS: Final = {
    "answered": "There is an answer: it is not missing, empty, or cut off before it has said anything.",
    "no_evasion": "It is an answer and no needless refusal or evasion, such as that it does not know or cannot.",
    "relevant": "It is about what was asked.",
    "no_process": (
        "It does not speak of its own process instead of answering: what it is about to do, or which tool failed."
    ),
    "consistent": "It does not contradict itself.",
    "safe": "It holds nothing that does harm: no dangerous advice, hate, or other people's private data.",
    "same_language": "It is in the language of the question, or in the one that the question asks for.",
}
REASONS: Final[tuple[dict[str, Any], ...]] = tuple(
    {"id": name, "value": statement, "required": True} for name, statement in _STATEMENTS.items()
)
