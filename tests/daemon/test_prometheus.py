"""Each metric has a value, the labels that its page names, and those of its targets if there are several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flywheel.daemon.prometheus import exposition
from flywheel.daemon.watch_figures import WatchFigures
from flywheel.store.stages import StageRecord
from flywheel.store.watches import ArmFigures
from tests.factories.metrics import by, parsed

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "files.md").read_text()
AT = "2026-11-22T10:00:00+00:00"
ODD = 'od"d\\na\nme.sqlite'
"""With everything in it that the format escapes."""
NOT_HERE = "judge_call_seconds"
"""A histogram of this process, without samples before the first call."""


WATCHED = WatchFigures(
    *(ArmFigures(name, 9, 8, 6, 1, 0, 1.0, 0.75, 60.0, {}) for name in ("agent@r0001", "agent@r0002")),
    e_value=1.5, e_value_missing=2.5, detectable_loss=None, units=18, untested=0, unmatched=0, doubts={},
    warnings=[], shows_harm=False, shows_missing=False,
)  # fmt: skip


def facts(target: str) -> dict[str, Any]:
    """A status in which nothing is empty."""
    calls = {"condition": "ok", "error": "", "calls": 7, "missed": 1, "dropped": 2, "refused": 3, "to_erase": 4}
    server = {
        "url": "http://127.0.0.1:8000", "condition": "ok", "serves": "agent@r0002", "error": "", "since": AT,
        "looked_at": AT, "calls": calls,
    }  # fmt: skip
    usage = {"calls": 2, "prompt_tokens": 30, "completion_tokens": 4, "cost": {"amount": 0.5, "currency": "EUR"}}
    figures = (
        "reward_std", "loss", "grad_norm", "entropy", "kl", "logprob_gap", "completion_tokens_mean",
        "truncated_share",
    )  # fmt: skip
    return {
        "version": "1.2.3", "daemon": {"pid": None}, "balanced": True, "dead_letters": 3, "due": 4,
        "replies": {"open": 1}, "skipped": {"error": 2}, "tasks": {"held": 3},
        "prompts": {"tasks": 5, "exact": 4, "inexact": {"hidden": 1}},
        "left_out": [{"reason": "tools", "tasks": 6}],
        "sources": [
            {"path": ODD, "configured": True, "condition": "", "read_at": AT, "longest_read_ms": 1500.0,
             "open_traces": 1, "restarts": 2, "replies": 3, "tasks": 4, "dead": 5, "private_traces": 6,
             "skipped": {"error": 7}},
        ],
        "judge": {"by_purpose": {"gates": usage}, "tokens_today": 34},
        "recent_verdicts": {"rejected_by": {"correct": 8}},
        "stages": {"judge": StageRecord(last_ok=AT, failing_since=AT)},
        "rounds": [{"comparison": None}, {"comparison": {"gain": 0.2, "lower": 0.1, "upper": 0.3}}],
        "rounds_by_state": {"training": 1}, "gate_decisions": {"promoted": 2},
        "by_adapter": [{"adapter": "r0001", "acceptance": 0.75}, {"adapter": "", "acceptance": None}],
        "live_round": {
            "round": "r0003", "measured": dict.fromkeys(figures, 0.25),
            "progress": {"phase": "training", "step": 2, "steps": 5, "reward": 0.5, "rollouts": 3,
                         "rollouts_planned": 8, "tokens_per_second": 9.5, "seconds_left": 61.0, "paused": "judge"},
        },
        "targets": {
            target: {
                "free_samples": 1, "waiting_samples": {"later": 2}, "min_samples": 3, "held_out": 4,
                "swaps": {"done": 5}, "replicas": [server],
                "watch": {"figures": WATCHED},
                "deployment": {"alias": "agent", "adapter": None, "since": AT},
            },
        },
    }  # fmt: skip


def test_every_metric_has_a_value_and_the_labels_of_its_page_and_no_other_is_there() -> None:
    text = exposition(facts("")).decode()
    labels = {
        name.removesuffix("_total"): set(re.findall(r"\w+", named))
        for name, named in re.findall(r"^- `(flywheel_\w+)`(?: \(([\w, ]*)\))?: ", PAGE, re.M)
    }
    found = parsed(text)
    assert set(found) == set(labels)
    assert set(re.findall(r"^# TYPE (\S+)", text, re.M)) == set(re.findall(r"^- `(flywheel_\w+)", PAGE, re.M))
    for name, samples in found.items():
        if name != f"flywheel_{NOT_HERE}":
            assert samples, name
            assert all(set(sample.labels) == labels[name] for sample in samples), name
            # The textfile collector of node_exporter refuses them.
            assert all(sample.timestamp is None for sample in samples), name


def test_values_are_those_of_the_facts() -> None:
    found = parsed(exposition(facts("")).decode())
    single = {name.removeprefix("flywheel_"): samples[0].value for name, samples in found.items() if samples}
    expected = {
        "info": 1, "daemon_up": 0, "balanced": 1, "tasks_left_out": 6, "source_longest_read_seconds": 1.5,
        "source_noted_timestamp_seconds": 1795341600, "stage_failing": 1, "judge_failing": 1, "judge_cost": 0.5,
        "active_adapter": 1, "live_round_paused": 1, "live_round_loss": 0.25, "calls_pulled": 7, "calls_to_erase": 4,
        "samples_waiting": 2, "swaps": 5,
    }  # fmt: skip
    assert {name: single[name] for name in expected} == expected
    assert by(found["flywheel_source_condition"], "source", "condition") == {f"{ODD} not read yet": 1}
    assert by(found["flywheel_judge_tokens"], "purpose", "kind") == {"gates prompt": 30, "gates completion": 4}
    assert by(found["flywheel_gate_gain"], "bound") == {"gain": 0.2, "lower": 0.1, "upper": 0.3}
    assert by(found["flywheel_active_adapter"], "alias", "adapter") == {"agent ": 1}
    assert by(found["flywheel_adapter_acceptance_ratio"], "adapter") == {"r0001": 0.75}
    conversations = by(found["flywheel_watch_conversations"], "alias", "version", "outcome")
    assert conversations["agent agent@r0002 failures"] == 2 and conversations["agent agent@r0001 missing"] == 1
    assert by(found["flywheel_watch_e_value"], "test") == {"outcomes": 1.5, "missing": 2.5}


def test_with_targets_theirs_have_a_label() -> None:
    found = parsed(exposition(facts("planner")).decode())
    assert by(found["flywheel_samples_free"], "target") == {"planner": 1}
    assert by(found["flywheel_samples_waiting"], "target", "reason") == {"planner later": 2}
    assert by(found["flywheel_swaps"], "target", "outcome") == {"planner done": 5}
