"""The shipped rubrics, and which of their statements say what."""

from __future__ import annotations

from flywheel.system import files

FOLDER = files.shipped_folder() / "rubrics"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
COMPLETION = {
    "agent-reward": "task_completion",
    "math-boxed": "correct",
    "qa-quality": "answers",
    "tool-use": "task_done",
}
"""The statement that the task is done, by rubric."""
INVENTED = {
    "agent-reward": "task_completion",
    "math-boxed": "correct",
    "qa-quality": "grounded",
    "tool-use": "grounded",
}
"""The statement that an invented answer does not meet, by rubric."""
