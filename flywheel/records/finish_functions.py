"""Functions by which an agent returns its answer: a call of one is the answer, not a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

FINISH_FUNCTIONS: Final = frozenset({"generate_response", "GenerateStructuredOutput"})
"""Those of AgentScope, which always end a rollout. `rollout.finish_tools` names others."""


def finish_answer(name: str, arguments: Mapping[str, Any]) -> str:
    """The answer in the arguments of a finish function: its `response`, or its only argument if that is a text, else
    all of them as JSON. Those of AgentScope's functions are a structured answer without a `response`: always JSON."""
    if isinstance(response := arguments.get("response"), str):
        return response
    values = list(arguments.values())
    if name not in FINISH_FUNCTIONS and len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(arguments, ensure_ascii=False)
