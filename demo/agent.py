"""`python -m demo.agent`: the same wheel for an agent with a tool, whose policy learns to call it.

In rollouts the policy acts with recorded results of the tool, or with `--workflow` by the agent itself, which has the
tool.

What is counted comes from Flywheel's own records: the verdicts, and the tasks it has made of the calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from demo import panel
from demo.command import play
from demo.tool_agent import AgentUsers
from demo.wheel import Scene
from flywheel.config.file import Config

DIALOGUES_PER_SECOND: Final = 8.0


def users(config: Config) -> AgentUsers:
    return AgentUsers(config.serving.urls[0], config.model.alias, rate=DIALOGUES_PER_SECOND)


SCENE: Final = Scene("demo-agent.yaml", users)
WORKFLOW: Final = Scene(
    "demo-agent.yaml",
    users,
    rollout={"agent": {"workflow": f"{Path(__file__).parent / 'tool_workflow.py'}:run"}, "workers": 4},
)


def call_shares(tasks: Iterable[str]) -> dict[str, float]:
    """By version: the share of its replies that called a tool, from the lines of the task file."""
    replies: dict[str, int] = {}
    calls: dict[str, int] = {}
    for line in tasks:
        metadata = json.loads(line)["metadata"]
        version = panel.version_of(metadata["adapter"])
        replies[version] = replies.get(version, 0) + 1
        called = any(step.get("tool_calls") for step in json.loads(metadata["trajectory_json"]))
        calls[version] = calls.get(version, 0) + called
    return {version: calls[version] / number for version, number in replies.items()}


def shares_of(folder: Path) -> dict[str, float]:
    return call_shares((folder / "state" / "tasks.jsonl").read_text(encoding="utf-8").splitlines())


def table(status: panel.Status, folder: Path) -> Table:
    return panel.table(status, shares_of(folder))


def figures(status: panel.Status, folder: Path) -> dict[str, Any]:
    """Of the live traffic: before is what the base model answered, after what the last promoted version answered."""
    shares = shares_of(folder)
    before, *_, after = panel.lines(status)
    return {
        "calls_before": shares.get(before.version),
        "calls_after": shares.get(after.version),
        "acceptance_before": before.acceptance,
        "acceptance_after": after.acceptance,
        "promoted": status["promoted"],
    }


def main() -> int:
    description = "Turn the wheel on a tiny policy that knows a tool and seldom calls it."
    return play("python -m demo.agent", description, SCENE, table, figures, workflow=WORKFLOW)


if __name__ == "__main__":
    sys.exit(main())
