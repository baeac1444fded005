"""The status for people: whole on a terminal or in a pipe, and as much of it as fits a screen that is watched.

Nothing of it is cut in the middle. What a screen has no room for goes by kind: first what is known of each source and
server beside its condition and counts, then the older rounds, then all rounds, then sources and servers one by one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from flywheel.cli.tables import (
    Fact,
    condition,
    counted,
    grid,
    plain,
    replica_line,
    replica_text,
    short_path,
    source_text,
)
from flywheel.round_progress import RoundProgress
from flywheel.terminal import quantity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ROUND_COLUMNS = ("round", "state", "reward", "held-out score", "why")
WATCH_SECONDS = 1.0
FEW_ROUNDS = 3
"""The newest, which stand first."""
WIDE = 100
"""From so many columns on, a table of rounds has room for its last column."""


class _Parts(NamedTuple):
    """What can be told in one line or in several, for each or for all of them."""

    sources: list[Fact]
    servers: list[Fact]
    gathering: list[Fact]
    samples: str


def show(state: dict[str, Any]) -> None:
    """Print all of it."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(_whole(state, console.width))
    else:
        typer.echo(_plain(state))


def watch(look: Callable[[], dict[str, Any]]) -> None:
    """Show what `look` finds, again and again: on a terminal in place, elsewhere whenever it has changed."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        _repeat(look)
    with Live(fitted(look(), console), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(fitted(look(), console), refresh=True)


def _repeat(look: Callable[[], dict[str, Any]]) -> None:
    before = ""
    while True:
        state = look()
        if (now := _plain(_without_looks(state))) != before:
            typer.echo(f"\n{_plain(state)}" if before else _plain(state))
            sys.stdout.flush()
            before = now
        time.sleep(WATCH_SECONDS)


def _without_looks(state: dict[str, Any]) -> dict[str, Any]:
    """What may change. That the servers were looked at once more is no news, nor is each rollout of a step."""
    live = state["live_round"]
    if live is not None and live["progress"] is not None:
        kept = {key: live["progress"][key] for key in ("phase", "step", "steps", "paused")}
        live = {**live, "progress": kept}
    return {**state, "live_round": live, "replicas": [{**each, "looked_at": None} for each in state["replicas"]]}


def fitted(state: dict[str, Any], console: Console) -> RenderableType:
    """As much of it as the terminal has lines for."""
    *richer, poorest = _forms(state, console.width)
    return next((form for form in richer if _lines(form, console) < console.height), poorest)


def _lines(form: RenderableType, console: Console) -> int:
    return len(console.render_lines(form, pad=False))


def _forms(state: dict[str, Any], width: int) -> Iterator[RenderableType]:
    """The richest first."""
    from rich.console import Group

    yield _whole(state, width)
    short = _Parts(
        [("source", _short(source)) for source in state["sources"]],
        [("server", replica_line(replica)) for replica in state["replicas"]],
        [],
        _samples(state),
    )
    hint: Fact = ("", "(shortened to this screen: `flywheel status` shows all)")
    for most in (len(state["rounds"]), FEW_ROUNDS):
        yield Group(_with_rounds(_facts(state, short), state, most, width), grid([hint]))
    yield grid([*_facts(state, short), hint])
    together = _Parts(
        _counted("sources", state["sources"], "read"),
        _counted("servers", state["replicas"], "looked at"),
        [],
        _counts_of_samples(state),
    )
    yield grid([*_facts(state, together), hint])
    # A terminal of a few lines: what may need somebody comes first.
    yield grid(list(reversed(_facts(state, together))))


def _counted(name: str, each: list[dict[str, Any]], done: str) -> list[Fact]:
    conditions = Counter(
        (one["condition"] or f"not {done} yet") if one.get("configured", True) else "not in the configuration"
        for one in each
    )
    return [(name, f"{len(each)}: {counted(conditions)}")]


def _whole(state: dict[str, Any], width: int) -> RenderableType:
    return _with_rounds(_facts(state, _in_full(state)), state, len(state["rounds"]), width)


def _in_full(state: dict[str, Any]) -> _Parts:
    return _Parts(
        [("source", source_text(source)) for source in state["sources"]],
        [("server", replica_text(replica)) for replica in state["replicas"]],
        [
            *(("gate", why) for why in (state["gate"]["shortfall"],) if why),
            *(
                ("left out", f"{quantity(each['tasks'], 'task')}: {each['why']}\n{each['do']}")
                for each in state["left_out"]
            ),
        ],
        _samples(state),
    )


def _with_rounds(facts: list[Fact], state: dict[str, Any], most: int, width: int) -> RenderableType:
    """The facts, and the newest rounds: in a table, or where that would be all folds, as facts too."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not state["rounds"]:
        return grid(facts)
    if width < WIDE:
        return grid([*facts, *(_round_fact(row) for row in islice(_rounds(state), most))])
    rounds = Table(*ROUND_COLUMNS)
    for row in islice(_rounds(state), most):
        rounds.add_row(*(Text(value, overflow="fold") for value in row))
    return Group(grid(facts), rounds)


def _round_fact(row: tuple[str, ...]) -> Fact:
    name, stands, *figures, why = row
    told = [f"{column} {figure}" for column, figure in zip(ROUND_COLUMNS[2:], figures, strict=False) if figure != "–"]
    return name, "\n".join(filter(None, (", ".join([stands, *told]), why)))


def _plain(state: dict[str, Any]) -> str:
    facts = _facts(state, _in_full(state))
    rounds = (ROUND_COLUMNS, *_rounds(state)) if state["rounds"] else ()
    return "\n".join([plain(facts), *("\t".join(row) for row in rounds)])


def _short(source: dict[str, Any]) -> str:
    counts = f"{quantity(source['replies'], 'reply', 'replies')}, {quantity(source['tasks'], 'task')}"
    return f"{short_path(source['path'])}: {condition(source)}, {counts}"


def _facts(state: dict[str, Any], parts: _Parts) -> list[Fact]:
    daemon = state["daemon"]["pid"]
    missing = state["no_state"]
    deployed = state["deployment"]
    return [
        *(("WARNING", text) for text in state["warnings"]),
        ("daemon", f"running (process {daemon})" if daemon else "not running"),
        ("state", missing or short_path(state["state_dir"])),
        *parts.sources,
        ("replies", counted(state["replies"]) or "none yet"),
        ("skipped", counted(state["skipped"]) or "none"),
        ("tasks", counted(state["tasks"]) or "none yet"),
        *(("verdicts", text) for text in _verdicts(state["recent_verdicts"])),
        ("samples", parts.samples),
        *parts.gathering,
        ("judge", _judge(state["judge"])),
        ("deployed", f"{deployed['alias']} → {deployed['adapter'] or 'the base model'}"),
        *parts.servers,
        *_live(state["live_round"]),
        ("waiting", state["waiting_for"] or "–"),
        ("letters", f"{state['dead_letters']} open: `flywheel dead-letters`" if state["dead_letters"] else "none"),
        ("balance", "–" if missing else "right" if state["balanced"] else "WRONG: run `flywheel audit`"),
    ]


def _verdicts(recent: dict[str, Any]) -> Iterator[str]:
    if not recent["judged"]:
        return
    yield f"last {recent['judged']:,}: {recent['accepted']:,} accepted"
    if recent["rejected_by"]:
        yield f"rejected by {counted(recent['rejected_by'])}"


def _judge(judge: dict[str, Any]) -> str:
    """What it waits for, and what it was used for."""
    from flywheel.cli.verdict_table import money, spent

    together = judge["usage"]
    lines = [judge["error"]] if judge["error"] else []
    if together["calls"] or not lines:
        lines.append(spent(together, 0, together["cost"]))
    parts = [
        f"{purpose} {quantity(used['calls'], 'call')}, {used['prompt_tokens'] + used['completion_tokens']:,} tokens"
        + (f", {money(used['cost'])}" if used["cost"] is not None else "")
        for purpose, used in judge["by_purpose"].items()
        if used["calls"]
    ]
    if len(parts) > 1:
        lines.append("; ".join(parts))
    return "\n".join(lines)


def _live(live: dict[str, Any] | None) -> list[Fact]:
    """The round that is under way."""
    if live is None:
        return []
    progress = live["progress"]
    told = RoundProgress.model_validate(progress).summary if progress is not None else live["state"]
    return [("round", f"{live['round']}: {told}")]


def _counts_of_samples(state: dict[str, Any]) -> str:
    text = f"{state['free_samples']} free of {state['min_samples']} needed, {state['held_out']} held out"
    return f"{text} ({missing} more needed)" if (missing := state["gate"]["missing"]) else text


def _samples(state: dict[str, Any]) -> str:
    waiting = [f"{number:,} {why}" for why, number in state["waiting_samples"].items()]
    if wait := state["new_samples"]["wait"]:
        waiting.insert(0, wait)
    if left_out := counted({each["reason"]: each["tasks"] for each in state["left_out"]}):
        waiting.append(f"left out: {left_out}")
    return "; ".join((_counts_of_samples(state), *waiting))


def _rounds(state: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for entry in state["rounds"]:
        comparison = entry["comparison"]
        score = f"{comparison['deployed_mean']:.2f} → {comparison['candidate_mean']:.2f}" if comparison else "–"
        first, last = entry["reward_first"], entry["reward_last"]
        reward = f"{first:.2f} → {last:.2f}" if first is not None and last is not None else "–"
        yield entry["round"], entry["state"], reward, score, entry["reason"] or entry["trigger"]
