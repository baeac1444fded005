"""`flywheel status`: all of it, or with `--watch` as much as fits the screen.

No line is cut. A screen that is too small loses, in this order: the details of sources and servers, older rounds, all
rounds, and the single sources and servers, which are then counted by their condition.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    binary_stdout,
    load_config,
    missing_state,
    print_json,
    read_state,
    run_async,
)
from flywheel.cli.tables import (
    Fact,
    Row,
    counted,
    facts_grid,
    facts_text,
    money,
    rows_table,
    short_path,
    source_condition,
    source_text,
)
from flywheel.daemon.status_parts import by_target, servers_of
from flywheel.system.terminal import escape_terminal, moment, quantity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ROUND_COLUMNS: Final = ("round", "state", "reward", "held-out score", "why")
WATCH_SECONDS = 1.0
FEW_ROUNDS: Final = 3
WIDE: Final = 100
"""Terminals of this width have room for a table of rounds."""


@app.command()
def status(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print metrics in Prometheus' text format.")] = False,
) -> None:
    """Show sources, tasks, samples, rounds and the deployed adapter."""
    from flywheel.daemon.status import snapshot

    if watch + as_json + metrics > 1:
        option = "--watch" if watch else "--json"
        raise typer.BadParameter("give one of --json, --metrics and --watch", param_hint=option)
    settings = load_config(config)

    def look() -> dict[str, Any]:
        found = run_async(read_state(settings, lambda conn: snapshot(conn, settings), warn=False))
        return found | {"no_state": missing_state(settings)}

    if as_json:
        print_json(look())
    elif metrics:
        from flywheel.daemon.prometheus import exposition

        binary_stdout().write(exposition(look()))
    elif watch:
        _watch(lambda: escape_terminal(look()))
    else:
        _print(escape_terminal(look()))


def _print(state: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(_with_rounds(_facts(state), state, len(state["rounds"]), console.width))
    else:
        typer.echo(_text(state))


def _watch(look: Callable[[], dict[str, Any]]) -> None:
    """Print what `look` returns every second: in place on a terminal, elsewhere when it has changed."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if console.is_terminal:
        with Live(fitted(look(), console), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(WATCH_SECONDS)
                live.update(fitted(look(), console), refresh=True)
    before = ""
    while True:
        state = look()
        if (now := _text(_without_noise(state))) != before:
            typer.echo(f"\n{_text(state)}" if before else _text(state))
            sys.stdout.flush()
            before = now
        time.sleep(WATCH_SECONDS)


def _without_noise(state: dict[str, Any]) -> dict[str, Any]:
    """Without the times when servers were checked and the single rollouts of a step, which change all the time."""
    live = state["live_round"]
    if live is not None and live["progress"] is not None:
        live = {**live, "progress": {key: live["progress"][key] for key in ("phase", "step", "steps", "paused")}}
    quiet = {
        name: {**own, "replicas": [{**each, "looked_at": None} for each in own["replicas"]]}
        for name, own in by_target(state).items()
    }
    return {**state, **({"targets": quiet} if "targets" in state else quiet[""]), "live_round": live}


def fitted(state: dict[str, Any], console: Console) -> RenderableType:
    """The most detailed form that the terminal has lines for."""
    rounds, width = len(state["rounds"]), console.width
    hint: Fact = ("", "(shortened to fit this screen: `flywheel status` shows everything)")
    short, counts = _facts(state, "short"), _facts(state, "counts")
    for form in (
        _with_rounds(_facts(state), state, rounds, width),
        *(_with_rounds([*short, hint], state, most, width) for most in (rounds, FEW_ROUNDS, 0)),
        facts_grid([*counts, hint]),
    ):
        if len(console.render_lines(form, pad=False)) < console.height:
            return form
    # On a terminal of a few lines, what may need attention comes first.
    return facts_grid(reversed(counts))


def _facts(state: dict[str, Any], form: Literal["whole", "short", "counts"] = "whole") -> list[Fact]:
    """Sources and servers are described in several lines or in one each, or are counted by their conditions."""
    from flywheel.training.data.round_progress import RoundProgress

    daemon, missing = state["daemon"]["pid"], state["no_state"]
    letters, sources = state["dead_letters"], state["sources"]
    targets = by_target(state)
    excluded, verdicts, live = list[Fact](), [], []
    if (recent := state["recent_verdicts"])["judged"]:
        verdicts.append(("verdicts", f"last {recent['judged']:,}: {recent['accepted']:,} accepted"))
        if recent["rejected_by"]:
            verdicts.append(("verdicts", f"rejected by {counted(recent['rejected_by'])}"))
    if (running := state["live_round"]) is not None:
        progress = running["progress"]
        text = running["state"] if progress is None else RoundProgress.model_validate(progress).summary
        live.append(("round", f"{_named(running)}: {text}"))
    prompts = [("prompts", _prompts(state["prompts"]))] if form != "counts" else []
    if form == "whole":
        sources = [("source", source_text(source)) for source in sources]
        servers = [("server", _server_text(replica)) for replica in servers_of(state)]
        excluded = [
            ("excluded", f"{quantity(each['tasks'], 'task')}: {each['why']}\n{each['do']}")
            for each in state["left_out"]
        ]
        shortfalls = {name: own["gate"]["shortfall"] for name, own in targets.items()}
        excluded = [*(("gate", _of(name, text)) for name, text in shortfalls.items() if text), *excluded]
    elif form == "short":
        sources = [("source", _source_line(source)) for source in sources]
        servers = [("server", f"{each['url']}: {_serves(each)}") for each in servers_of(state)]
    else:
        sources = [("sources", _conditions(sources, "not read yet"))]
        servers = [("servers", _conditions(servers_of(state), _UNCHECKED))]
    return [
        *(("WARNING", text) for text in state["warnings"]),
        ("daemon", f"running (process {daemon})" if daemon else "not running"),
        ("state", missing or short_path(state["state_dir"])),
        *sources,
        ("replies", counted(state["replies"]) or "none yet"),
        ("skipped", counted(state["skipped"]) or "none"),
        ("tasks", counted(state["tasks"]) or "none yet"),
        *prompts,
        *verdicts,
        *(("samples", text) for text in (_sample_counts if form == "counts" else _samples)(state)),
        *excluded,
        ("judge", _judge(state["judge"])),
        *(
            ("deployed", f"{own['deployment']['alias']} → {own['deployment']['adapter'] or 'the base model'}")
            for own in targets.values()
        ),
        *servers,
        *live,
        ("waiting", state["waiting_for"] or "–"),
        ("dead letters", f"{letters:,} open: see `flywheel dead-letters`" if letters else "none"),
        ("ledger", "–" if missing else "balanced" if state["balanced"] else "NOT balanced: run `flywheel audit`"),
    ]


def _source_line(source: dict[str, Any]) -> str:
    counts = f"{quantity(source['replies'], 'reply', 'replies')}, {quantity(source['tasks'], 'task')}"
    return f"{short_path(source['path'])}: {source_condition(source)}, {counts}"


_UNCHECKED: Final = "not checked yet (requires `flywheel run`)"


def _serves(replica: dict[str, Any]) -> str:
    if not replica["condition"]:
        return _UNCHECKED
    return f"{replica['condition']}, serves {replica['serves']}" if replica["serves"] else str(replica["condition"])


def _server_text(replica: dict[str, Any]) -> str:
    """An inference server: what it serves, since when, when it was checked, and its error."""
    times = (("since", "since"), ("checked", "looked_at"))
    moments = [f"{name} {moment(replica[key])} UTC" for name, key in times if replica["condition"] and replica[key]]
    lines = (replica["url"], ", ".join((_serves(replica), *moments)), replica["error"], _calls(replica["calls"]))
    return "\n".join(filter(None, lines))


def _calls(calls: dict[str, Any]) -> str:
    """What was pulled from a server's call log, and what is missing; empty before it was asked."""
    if not calls["condition"]:
        return ""
    if calls["condition"] == "off":
        return "calls: not recorded (serving.call_log)"
    parts = [f"{calls['calls']:,} pulled"]
    if calls["condition"] != "ok":
        parts.append(f"{calls['condition']} now")
    if calls["missed"]:
        parts.append(f"{calls['missed']:,} were pruned before")
    if calls["dropped"]:
        parts.append(f"{calls['dropped']:,} could not be recorded")
    return f"calls: {', '.join(parts)}"


def _prompts(prompts: dict[str, Any]) -> str:
    """The share of tasks with an exact prompt, and why the others have none."""
    if not prompts["tasks"]:
        return "none yet"
    text = f"{prompts['exact']:,} of {prompts['tasks']:,} exact ({prompts['exact'] / prompts['tasks']:.0%})"
    reasons = [f"{number:,} {_EXCLUDED[reason]}" for reason, number in prompts["inexact"].items()]
    return "; ".join([text, *reasons])


def _conditions(each: list[dict[str, Any]], unknown: str) -> str:
    conditions = Counter(
        (one["condition"] or unknown) if one.get("configured", True) else "not in the configuration" for one in each
    )
    return f"{len(each)}: {counted(conditions)}"


def _judge(judge: dict[str, Any]) -> str:
    """Its error, and its usage in all and by purpose."""
    from flywheel.cli.verdict_table import spent

    usage = judge["usage"]
    lines = [judge["error"]] if judge["error"] else []
    if usage["calls"] or not lines:
        lines.append(spent(usage, 0, usage["cost"]))
    parts = [
        f"{purpose} {quantity(used['calls'], 'call')}, {used['prompt_tokens'] + used['completion_tokens']:,} tokens"
        + (f", {money(used['cost'])}" if used["cost"] is not None else "")
        for purpose, used in judge["by_purpose"].items()
        if used["calls"]
    ]
    if len(parts) > 1:
        lines.append("; ".join(parts))
    return "\n".join(lines)


def _of(target: str, text: str) -> str:
    """A text about a target; without targets, as it is."""
    return f"{target}: {text}" if target else text


def _named(entry: dict[str, Any]) -> str:
    """A round, with its target if there are several."""
    return f"{entry['round']} ({entry['target']})" if entry.get("target") else str(entry["round"])


def _sample_count(own: Mapping[str, Any]) -> str:
    text = f"{own['free_samples']} free of {own['min_samples']} needed, {own['held_out']} held out"
    missing = own["gate"]["missing"]
    return f"{text} ({missing} more needed)" if missing else text


def _sample_counts(state: dict[str, Any]) -> list[str]:
    return [_of(name, _sample_count(own)) for name, own in by_target(state).items()]


def _samples(state: dict[str, Any]) -> list[str]:
    """Counts of each target, why samples wait, and why tasks are excluded from rounds."""
    texts = []
    for name, own in by_target(state).items():
        waiting = [f"{number:,} {why}" for why, number in own["waiting_samples"].items()]
        told = "; ".join(filter(None, (_sample_count(own), own["new_samples"]["wait"], *waiting)))
        texts.append(_of(name, told))
    excluded = "; ".join(f"{each['tasks']:,} excluded ({_EXCLUDED[each['reason']]})" for each in state["left_out"])
    if excluded and len(texts) == 1:
        return [f"{texts[0]}; {excluded}"]
    return [*texts, excluded] if excluded else texts


_EXCLUDED: Final = {
    "image": "image input",
    "hidden": "hidden message",
    "inexact": "inexact prompt",
    "tools": "tools",
    "uncalled": "no tool called",
    "unrecorded": "no tool result recorded",
    "model": "other model",
    "target": "agent of no target",
    "repeated": "repeated in training",
}
"""Why rounds exclude tasks, by `flywheel.records.exclusion.Exclusion`."""


def _rounds(state: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for entry in state["rounds"]:
        comparison = entry["comparison"]
        score = f"{comparison['deployed_mean']:.2f} → {comparison['candidate_mean']:.2f}" if comparison else "–"
        first, last = entry["reward_first"], entry["reward_last"]
        reward = f"{first:.2f} → {last:.2f}" if first is not None and last is not None else "–"
        yield _named(entry), entry["state"], reward, score, entry["reason"] or entry["trigger"]


def _with_rounds(facts: list[Fact], state: dict[str, Any], most: int, width: int) -> RenderableType:
    """The facts and the newest rounds: in a table, or as facts on a narrow terminal."""
    from rich.console import Group

    rounds = list(islice(_rounds(state), most))
    if rounds and width >= WIDE:
        rows = [Row(row[:-1], row[-1:]) for row in rounds]
        return Group(facts_grid(facts), "", rows_table(ROUND_COLUMNS, rows, fold=ROUND_COLUMNS))
    return facts_grid([*facts, *map(_round_fact, rounds)])


def _round_fact(row: tuple[str, ...]) -> Fact:
    name, state, *figures, why = row
    shown = [
        f"{column} {figure}" for column, figure in zip(ROUND_COLUMNS[2:], figures, strict=False) if figure != "–"
    ]
    return name, "\n".join(filter(None, (", ".join([state, *shown]), why)))


def _text(state: dict[str, Any]) -> str:
    rounds = (ROUND_COLUMNS, *_rounds(state)) if state["rounds"] else ()
    return "\n".join([facts_text(_facts(state)), *("\t".join(row) for row in rounds)])
