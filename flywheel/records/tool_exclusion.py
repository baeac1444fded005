"""Whether the tools of a reply could answer in a rollout: what of its calls is recorded. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flywheel.records.exclusion import Exclusion
from flywheel.records.finish_functions import FINISH_FUNCTIONS
from flywheel.records.tool_calls import Call, calls_in
from flywheel.records.tool_results import functions_by_name
from flywheel.records.trace import ChatMessage


def exclusion_of_tools(tools: Sequence[Mapping[str, Any]], steps: Sequence[ChatMessage]) -> Exclusion | None:
    """The exclusion of a reply that was offered these tools and made these steps; None without tools.

    Calls of finish functions are answers, not calls. Functions that only `rollout.finish_tools` names are not known
    here: planning leaves out what has no other call.
    """
    if not tools and not any(step.get("tool_calls") or step.get("role") == "tool" for step in steps):
        return None
    offered = functions_by_name(tools).keys() - FINISH_FUNCTIONS
    calls = calls_in(steps)
    calls = [call for call in calls if call.name not in FINISH_FUNCTIONS]
    if any(call.name in offered and call.result is not None and _is_well_formed(call) for call in calls):
        return Exclusion.TOOLS
    # A result without a call shows that one was made.
    has_results = any(step.get("role") == "tool" and str(step.get("name")) not in FINISH_FUNCTIONS for step in steps)
    return Exclusion.UNRECORDED if calls or has_results or not tools else Exclusion.UNCALLED


def _is_well_formed(call: Call) -> bool:
    try:
        return isinstance(call.parsed, dict)
    except ValueError:
        return False
