"""The filter `llm_evaluate`: the judge's position in a chain, with AgentJet's parameters and built-in criteria."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field, field_validator

from flywheel.config.judge import MAX_THREADS
from flywheel.config.section import Section

AGENTJET_TEMPERATURE: Final = 0.5
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
AGENTJET_CRITERIA: Final[tuple[dict[str, Any], ...]] = tuple(
    {"id": name, "value": statement, "required": True} for name, statement in _STATEMENTS.items()
)
"""The reasons for which AgentJet drops tasks in addition to `custom_rubrics`, as criteria."""


class LlmEvaluate(Section):
    """Parameters of `llm_evaluate`. The configuration and the rubric give the defaults."""

    custom_rubrics: str | None = None
    """AgentJet's flat text: the rubric, in place of `filter.rubric`."""
    builtin: bool = True
    """With `custom_rubrics`, judge the seven reasons for which AgentJet drops a task in any case as well."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of the judge. With `custom_rubrics`: 0.5, as in AgentJet."""
    print_reason: bool = False
    """Log the judge's reason for every task."""
    max_thread: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """Most calls in flight."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest answer of the judge, tokens."""

    @field_validator("custom_rubrics", mode="before")
    @classmethod
    def _joined(cls, text: object) -> object:
        if isinstance(text, list) and all(isinstance(part, str) for part in text):
            text = "\n".join(text)
        if isinstance(text, str) and not text.strip():
            raise ValueError("must be a text")
        return text
