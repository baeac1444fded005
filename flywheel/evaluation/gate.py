"""The gate: what a comparison must show before an adapter may serve. Decides from figures; computes none."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.config import GateSettings
from flywheel.round import Comparison


@dataclass(frozen=True, slots=True)
class Decision:
    promote: bool
    reason: str


def decide(comparison: Comparison, gate: GateSettings) -> Decision:
    """Promote only what is shown to be better: the lower bound of the gain's interval lies above `min_gain`."""
    figures = (
        f"gain {comparison.gain:+.3f}, {comparison.confidence:.0%} interval {comparison.lower:+.3f} to"
        f" {comparison.upper:+.3f}; candidate {comparison.candidate_mean:.3f}, deployed"
        f" {comparison.deployed_mean:.3f}, on {_count(comparison.tasks)}"
    )
    if comparison.undecided:
        figures += f", {comparison.undecided} more undecided"
    if comparison.tasks < gate.min_tasks:
        return Decision(False, f"not enough evidence: fewer than {_count(gate.min_tasks)} decided ({figures})")
    if comparison.lower > gate.min_gain:
        return Decision(True, f"better: {figures}")
    needed = "0" if gate.min_gain == 0 else f"{gate.min_gain:g}"
    return Decision(False, f"not shown to be better: the lower bound is not above {needed} ({figures})")


def _count(tasks: int) -> str:
    return f"{tasks} held-out task" if tasks == 1 else f"{tasks} held-out tasks"
