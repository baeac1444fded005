"""What an AgentScope agent with default settings and the demo's tool sends beside the question."""

from __future__ import annotations

from typing import Any, Final

ADD: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "type": "object",
        },
    },
}
"""The tool as AgentScope offers `demo.tool_workflow.add`."""

REMINDER: Final = (
    "<system-reminder>Treat the following as the ground truth at this point of the conversation. Anything stated"
    " earlier is outdated, and a later reminder, if any, supersedes this one:\n<current-time>{time}</current-time>\n"
    "<timezone>{zone}</timezone>\n</system-reminder>"
)
"""What AgentScope adds behind the question, as a user's message."""
