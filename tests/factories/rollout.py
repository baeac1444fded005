"""Lines of the rollouts of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

IN_ONE_FILE = Path(__file__).parents[1] / "data" / "round_in_one_file"
"""The directory of a round that a worker of an earlier version has ended: two steps of two tasks."""
REASON = "The box holds 8, and 3 plus 4 is 7, which is easy to see when one counts on from four."
CALL = {"function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
STEPS = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "7"},
]


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "token_ids": [1, 2, 3, 4, 5, 6],
        "loss_mask": [0, 0, 1, 1, 1, 1],
        "logprobs": [None, None, -0.05, -0.5, None, -3.0],
        "text": ["What?", "\n", "It", " is", "\n", " 7"],
        **changes,
    }


def rollout(**changes: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "task_id": "t-1",
        "group": 0,
        "seed": 7,
        "steps": [],
        "answer": "\\boxed{8}",
        "truncated": False,
        "reward": 0.25,
        "criteria": [
            {"criterion": "boxed", "choice": "yes", "value": 1.0, "passed": True, "reason": "There is a box."},
            {"criterion": "right", "choice": "no", "value": 0.0, "passed": False, "reason": REASON},
        ],
        "error": "",
        "missed": False,
        "advantage": -0.866025,
        "dropped": None,
        "samples": [sample()],
        **changes,
    }
