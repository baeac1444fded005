"""What the demo shows, from status and metrics alone."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, RenderableType

from demo import panel


def status(**values: Any) -> dict[str, Any]:
    tasks = {"pending": 5, "accepted": 20, "consumed": 10, "reserved": 8, "rejected": 70, "undecided": 7}
    return {
        "replies": {"open": 1, "closed": 0, "converted": 120, "skipped": 2, "dead": 0}, "skipped": {"error": 2},
        "tasks": tasks, "free_samples": 20, "min_samples": 48, "held_out": 30, "rounds": [], "promoted": 0,
        "live_round": None, "waiting_for": None, "by_adapter": [],
        "deployment": {"alias": "demo-agent", "adapter": None, "since": None}, **values,
    }  # fmt: skip


def done(number: int, state: str = "promoted", **values: Any) -> dict[str, Any]:
    means = {"candidate_mean": 0.2 + 0.2 * number, "deployed_mean": 0.2 * number}
    return {
        "round": f"r{number:04}", "state": state, "reason": "", "parent": f"r{number - 1:04}" if number > 1 else None,
        "adapter": f"r{number:04}", "comparison": {**means, "gain": 0.2, "lower": 0.1, "upper": 0.3},
        "finished_at": "2026-01-01T00:00:00", **values,
    }  # fmt: skip


def text(shown: RenderableType) -> str:
    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


STEPS = [
    {"event": "phase", "phase": "training"},
    {"event": "step", "step": 1, "steps": 20, "reward_mean": 0.25},
    {"event": "step", "step": 2, "steps": 20, "reward_mean": None},
    {"event": "step", "step": 3, "steps": 20, "reward_mean": 0.75},
]


def test_the_funnel_counts_samples_that_rounds_have_used() -> None:
    assert panel.funnel(status()) == {"replies": 123, "tasks": 120, "accepted": 38, "rejected": 70, "undecided": 7}


def test_the_panel_while_a_round_trains() -> None:
    shown = text(panel.render(status(live_round={"round": "r0001"}), STEPS))
    assert "123" in shown and "38" in shown
    assert "round r0001: training, step 3 of 20" in shown
    assert "0.25 → 0.75 after 2 steps" in shown
    assert panel.sparkline([0.25, 0.75]) in shown
    assert "demo-agent → the base model" in shown


def test_the_panel_after_rounds() -> None:
    rounds = [done(2, "rejected"), done(1), done(3, "failed", comparison=None, reason="the worker died")]
    shown = text(panel.render(status(rounds=rounds, deployment={"alias": "demo-agent", "adapter": "r0001"}), []))
    assert "promoted: held-out 0.20 → 0.40, gain +0.10 … +0.30" in shown
    assert "rejected: held-out 0.40 → 0.60" in shown
    assert "failed: the worker died" in shown
    assert "demo-agent@r0001" in shown
    assert "gathering samples: 20 of 48" in shown


def test_the_panel_while_a_promotion_is_watched() -> None:
    new, old = ({"version": name, "rate": rate, "outcomes": 36} for name, rate in (("r0001", 0.67), ("base", 0.28)))
    watch = {"figures": {"new": new, "old": old, "e_value": 1.0}}
    told = "r0001 0.67 of 36 against base 0.28 of 36, e-value 1 of 20"
    assert told in text(panel.render(status(watch=watch), []))
    assert panel.plain(status(watch=watch), []).endswith(f"; {told}")
    assert panel.watching(status(watch=None)) == ""


def test_the_panel_before_anything_has_happened() -> None:
    empty = status(replies={}, tasks={}, free_samples=0)
    assert "0" in text(panel.render(empty, []))
    assert panel.plain(empty, []) == (
        "0 replies, 0 tasks, 0 accepted, 0 rejected, 0 undecided; gathering samples: 0 of 48; "
        "serving demo-agent → the base model"
    )


@pytest.mark.parametrize(
    ("values", "bars"), [([0.0, 1.0], "▁█"), ([-0.1, 1.5], "▁█"), ([0.5], "▅"), ([], ""), ([0.49], "▄")]
)
def test_the_sparkline_has_an_absolute_scale(values: list[float], bars: str) -> None:
    assert panel.sparkline(values) == bars


def test_the_table_is_what_was_recorded() -> None:
    traffic = [
        {"adapter": "policy", "accepted": 20, "rejected": 79, "undecided": 5, "acceptance": 0.2},
        {"adapter": "", "accepted": 1, "rejected": 0, "undecided": 0, "acceptance": 1.0},
        {"adapter": "demo-agent@r0001", "accepted": 30, "rejected": 30, "undecided": 0, "acceptance": 0.5},
    ]
    rounds = [done(3), done(2, "rejected"), done(1)]
    found = panel.lines(status(rounds=rounds, by_adapter=traffic))
    assert [line.version for line in found] == ["base", "r0001", "r0003"]
    assert [line.acceptance for line in found] == [0.21, 0.5, None]
    assert [line.held_out for line in found] == pytest.approx([0.2, 0.4, 0.8])
    shown = text(panel.table(status(rounds=rounds, by_adapter=traffic)))
    assert "0.21" in shown and "100" in shown and "–" in shown
