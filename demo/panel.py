"""What the demo shows: the funnel, the round's reward curve, what is deployed, and at the end the table.

Pure functions from recorded data (the status of `flywheel status --json` and a round's metrics) to something that
rich can print; nothing is read or measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Status = Mapping[str, Any]
Metrics = Sequence[Mapping[str, Any]]

BARS: Final = "▁▂▃▄▅▆▇█"
BASE: Final = "base"
FUNNEL: Final = (
    ("replies", "white"),
    ("tasks", "cyan"),
    ("accepted", "green"),
    ("rejected", "red"),
    ("undecided", "yellow"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One version in the final table; what was not measured is None."""

    version: str
    accepted: int
    rejected: int
    acceptance: float | None
    held_out: float | None


def funnel(status: Status) -> dict[str, int]:
    """How many replies came, became tasks, and were accepted (now or used by a round since), rejected, undecided."""
    tasks = status["tasks"]
    counted = {
        "replies": sum(status["replies"].values()),
        "tasks": sum(tasks.values()),
        "accepted": sum(tasks.get(state, 0) for state in ("accepted", "reserved", "consumed")),
        "rejected": tasks.get("rejected", 0),
        "undecided": tasks.get("undecided", 0),
    }
    return {name: counted[name] for name, _ in FUNNEL}


def rewards(metrics: Metrics) -> list[float]:
    """The mean reward of each step that has one."""
    means = (line.get("reward_mean") for line in metrics if line.get("event") == "step")
    return [float(mean) for mean in means if mean is not None]


def sparkline(values: Sequence[float]) -> str:
    """Values in 0…1 as bars on that scale, not on their own: half the height is a reward of one half."""
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))] for value in values)


def phase(status: Status, metrics: Metrics) -> str:
    """What the wheel is doing, in one clause."""
    live = status.get("live_round")
    if live is None:
        waiting = status.get("waiting_for")
        needed = status.get("min_samples")
        gathered = f"gathering samples: {status['free_samples']}{f' of {needed}' if needed else ''}"
        return f"{gathered} ({waiting})" if waiting else gathered
    steps = [line for line in metrics if line.get("event") == "step"]
    phases = [line["phase"] for line in metrics if line.get("event") == "phase"]
    doing = phases[-1] if phases else "starting"
    if doing == "training" and steps:
        doing = f"training, step {steps[-1]['step']} of {steps[-1]['steps']}"
    return f"round {live['round']}: {doing}"


def serving(status: Status) -> str:
    deployment = status.get("deployment") or {}
    adapter = deployment.get("adapter")
    return (
        f"{deployment['alias']}@{adapter}" if adapter else f"{deployment.get('alias', 'the alias')} → the base model"
    )


def render(status: Status, metrics: Metrics) -> RenderableType:
    """The live panel."""
    counts = funnel(status)
    most = max(*counts.values(), 1)
    bars = Table.grid(padding=(0, 2))
    bars.add_column(style="bold", min_width=9)
    bars.add_column(justify="right", min_width=5)
    bars.add_column()
    for name, style in FUNNEL:
        bar = ProgressBar(total=most, completed=counts[name], width=44, complete_style=style, finished_style=style)
        bars.add_row(name, str(counts[name]), bar)

    wheel = Table.grid(padding=(0, 2))
    wheel.add_column(style="bold", min_width=9)
    wheel.add_column()
    wheel.add_row("now", phase(status, metrics))
    curve = rewards(metrics)
    if curve:
        wheel.add_row("reward", Text(sparkline(curve), style="magenta"))
        wheel.add_row("", f"{curve[0]:.2f} → {curve[-1]:.2f} after {len(curve)} steps")
    wheel.add_row("serving", Text(serving(status), style="bold green"))
    if watched := watching(status):
        wheel.add_row("watched", watched)
    for done in reversed([each for each in status["rounds"] if each.get("comparison") or each.get("finished_at")]):
        wheel.add_row(done["round"], _outcome(done))
    return Panel(Group(bars, Text(), wheel), title="flywheel", border_style="cyan", box=box.ROUNDED, width=78)


def plain(status: Status, metrics: Metrics) -> str:
    """The same in one line, for where there is no terminal."""
    counts = ", ".join(f"{number} {name}" for name, number in funnel(status).items())
    curve = rewards(metrics)
    reward = f"; reward {curve[0]:.2f} → {curve[-1]:.2f}" if curve else ""
    watched = watching(status)
    return f"{counts}; {phase(status, metrics)}{reward}; serving {serving(status)}{f'; {watched}' if watched else ''}"


def watching(status: Status) -> str:
    """How both versions of a watched promotion fare; empty without one."""
    if not (watch := status.get("watch")):
        return ""
    figures = watch["figures"]
    shares = [
        f"{arm['version']} {_share(arm['rate'])} of {arm['outcomes']}" for arm in (figures["new"], figures["old"])
    ]
    return f"{' against '.join(shares)}, e-value {figures['e_value']:.2g} of 20"


def lines(status: Status) -> list[Line]:
    """The base model and each promoted adapter, oldest first, with what was recorded of them.

    Acceptance is of the traffic that a version answered; the held-out score is the mean reward with which the gate
    measured it, against its successor for the base model and against its predecessor for the rest.
    """
    promoted = sorted((each for each in status["rounds"] if each["state"] == "promoted"), key=lambda e: e["round"])
    held_out: dict[str, float | None] = {BASE: None}
    for each in promoted:
        comparison = each["comparison"] or {}
        if held_out[BASE] is None and not each.get("parent"):
            held_out[BASE] = comparison.get("deployed_mean")
        held_out[each["adapter"] or each["round"]] = comparison.get("candidate_mean")
    found = []
    for version, score in held_out.items():
        served = [entry for entry in status["by_adapter"] if version_of(entry["adapter"]) == version]
        accepted, rejected = (sum(entry[kind] for entry in served) for kind in ("accepted", "rejected"))
        acceptance = accepted / (accepted + rejected) if accepted + rejected else None
        found.append(Line(version, accepted, rejected, acceptance, score))
    return found


def version_of(model: str) -> str:
    """`demo-agent@r0001` is the version r0001; a name without one is the base model's."""
    return model.partition("@")[2] or BASE


def table(status: Status, calls: Mapping[str, float] | None = None) -> Table:
    """The last word: what each version's traffic was worth, and what share of it called a tool, if that is given."""
    shown = Table(title="What the wheel has done", box=box.SIMPLE_HEAVY)
    headings = ["adapter", "replies judged", "accepted", "acceptance", "held-out score"]
    if calls is not None:
        headings.insert(1, "calls the tool")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "adapter" else "right")
    for line in lines(status):
        judged = line.accepted + line.rejected
        cells = [str(judged), str(line.accepted), _share(line.acceptance), _share(line.held_out)]
        if calls is not None:
            cells.insert(0, _share(calls.get(line.version)))
        shown.add_row(line.version, *cells)
    return shown


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _outcome(done: Mapping[str, Any]) -> Text:
    comparison = done.get("comparison") or {}
    styles = {"promoted": "green", "rejected": "red", "failed": "red"}
    state = str(done["state"])
    if not comparison:
        return Text(f"{state}: {done.get('reason', '')}"[:60], style=styles.get(state, ""))
    figures = "{deployed_mean:.2f} → {candidate_mean:.2f}, gain {lower:+.2f} … {upper:+.2f}".format(**comparison)
    return Text(f"{state}: held-out {figures}", style=styles.get(state, ""))
