"""`flywheel status`: all of it, or with `--watch` as much as fits the screen.

No line is cut. On a screen that is too small, sources and servers are counted by their condition, and older rounds,
then all rounds, are left out.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Final

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
    counted,
    facts_grid,
    facts_text,
    money,
    print_facts,
    short_path,
    source_text,
    spent,
)
from flywheel.system.terminal import escape_terminal, moment, percent, quantity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flywheel.daemon.status import Facts
    from flywheel.store.samples import PromptCounts
    from flywheel.store.stages import StageRecord

WATCH_SECONDS = 1.0
FEW_ROUNDS: Final = 3
HINT: Final = ("", "(shortened to fit this screen: `flywheel status` shows everything)")
MISSING_CALLS: Final = {
    "missed": "were pruned before",
    "dropped": "could not be recorded",
    "refused": "were not to be recorded",
    "to_erase": "to be erased there",
}
"""What happened to calls that were not pulled from a server's call log, or are to be erased there."""
_UNCHECKED: Final = "not checked yet (requires `flywheel run`)"


@app.command()
def status(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print metrics in Prometheus' text format.")] = False,
) -> None:
    """Show sources, tasks, samples, rounds and the deployed adapter."""
    from flywheel.daemon import status as daemon_status

    if watch + as_json + metrics > 1:
        option = "--watch" if watch else "--json"
        raise typer.BadParameter("give one of --json, --metrics and --watch", param_hint=option)
    settings = load_config(config)

    def look() -> Facts:
        missing = missing_state(settings)
        return run_async(
            read_state(settings, lambda conn: daemon_status.snapshot(conn, settings, missing), warn=False)
        )

    if as_json:
        print_json(daemon_status.as_json(look()))
    elif metrics:
        from flywheel.daemon.prometheus import exposition

        binary_stdout().write(exposition(look()))
    elif watch:
        _watch(look)
    else:
        print_facts(facts_of(look()))


def _watch(look: Callable[[], Facts]) -> None:
    """Print what `look` returns every second: in place on a terminal, elsewhere when it has changed."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if console.is_terminal:
        with Live(fitted(look(), console), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(WATCH_SECONDS)
                live.update(fitted(look(), console), refresh=True)
    before = None
    while True:
        now = look()
        if (known := facts_of(now, with_noise=False)) != before:
            print("" if before is None else "\n", facts_text(facts_of(now)), sep="")
            sys.stdout.flush()
            before = known
        time.sleep(WATCH_SECONDS)


def fitted(status: Facts, console: Console) -> Table:
    """The most detailed form that the terminal has lines for."""
    counts = facts_of(status, 0, is_whole=False)
    for facts in (
        facts_of(status),
        *([*facts_of(status, most, is_whole=False), HINT] for most in (len(status["rounds"]), FEW_ROUNDS)),
        [*counts, HINT],
    ):
        if len(console.render_lines(form := facts_grid(facts), pad=False)) < console.height:
            return form
    # On a terminal of a few lines, what may need attention comes first.
    return facts_grid(reversed(counts))


def facts_of(status: Facts, most: int | None = None, *, is_whole: bool = True, with_noise: bool = True) -> list[Fact]:
    """The facts for people, with the newest rounds, at most so many. Unless it `is_whole`, sources and servers are
    counted by their conditions. Noise changes all the time: when servers were checked, and single rollouts."""
    from flywheel.daemon.status import servers

    recent, langfuse, letters = status["recent_verdicts"], status["langfuse"], status["dead_letters"]
    pid, missing, cron, left_out = status["daemon"]["pid"], status["no_state"], status["next_cron_times"], []
    if is_whole:
        sources = [("source", source_text(source)) for source in status["sources"]]
        of_servers = [("server", _server(server, with_noise=with_noise)) for server in servers(status)]
        left_out = [f"{quantity(each['tasks'], 'task')}: {each['why']}\n{each['do']}" for each in status["left_out"]]
    else:
        states = (
            (each["condition"] or "not read yet") if each["configured"] else "not in the configuration"
            for each in status["sources"]
        )
        sources = [("sources", _conditions(Counter(states)))]
        of_servers = [("servers", _conditions(Counter(each["condition"] or _UNCHECKED for each in servers(status))))]
    facts: list[Fact] = [
        *(("WARNING", text) for text in status["warnings"]),
        ("daemon", f"running (process {pid})" if pid else "not running"),
        ("state", missing or short_path(status["state_dir"])),
        *sources,
        ("replies", counted(status["replies"]) or "none yet"),
        ("skipped", counted(status["skipped"]) or "none"),
        ("tasks", counted(status["tasks"]) or "none yet"),
        ("prompts", _prompts(status["prompts"])),
        *([("verdicts", f"last {recent.judged:,}: {recent.accepted:,} accepted")] if recent.judged else ()),
        *([("verdicts", f"rejected by {counted(recent.rejected_by)}")] if recent.rejected_by else ()),
        *(fact for target in status["targets"].items() for fact in _of_target(*target, is_whole=is_whole)),
        *(("excluded", text) for text in left_out),
        ("judge", _judge(status["judge"])),
        *(("failing", _failing(name, each)) for name, each in status["stages"].items() if each.failing_since),
        *of_servers,
    ]
    if langfuse is not None:
        counts = f"{quantity(langfuse['sent'], 'score')} sent, {langfuse['refused']:,} refused"
        untraced = f"{quantity(langfuse['untraced'], 'reply', 'replies')} without a trace of OpenTelemetry"
        facts.append(("langfuse", f"{langfuse['server']}: {counts}, {untraced}"))
    facts += [
        *([("cron", f"next at {', '.join(f'{moment(at)} UTC' for at in cron)}")] if cron else ()),
        ("waiting", status["waiting_for"] or "–"),
        ("dead letters", f"{letters:,} open: see `flywheel dead-letters`" if letters else "none"),
        ("ledger", "–" if missing else "balanced" if status["balanced"] else "NOT balanced: run `flywheel audit`"),
        *_rounds(status, most, with_noise=with_noise),
    ]
    return [(name, escape_terminal(text)) for name, text in facts]


def _conditions(counts: Counter[str]) -> str:
    return f"{counts.total()}: {counted(counts)}"


def _of_target(name: str, own: Facts, *, is_whole: bool) -> Iterator[Fact]:
    """Samples, gate and deployment of a target."""
    of = f"{name}: " if name else ""
    gate, deployed, watch = own["gate"], own["deployment"], own["watch"]
    samples = f"{own['free_samples']} free of {own['min_samples']} needed, {own['held_out']} held out for the gate"
    if gate["missing"]:
        samples += f" ({quantity(gate['conversations'], 'conversation')}, {gate['missing']} more needed)"
    waiting = (f"{number:,} {why}" for why, number in own["waiting_samples"].items())
    yield "samples", of + "; ".join(filter(None, (samples, own["new_samples"]["wait"], *waiting)))
    if is_whole and gate["shortfall"]:
        yield "gate", of + gate["shortfall"]
    yield "deployed", f"{deployed['alias']} → {deployed['adapter'] or 'the base model'}"
    if watch is not None:
        yield "watched", _watched(watch)


def _failing(name: str, stage: StageRecord) -> str:
    again = f", is tried again at {moment(stage.waits_until)} UTC" if stage.waits_until else ""
    return f"{name} since {moment(stage.failing_since)} UTC{again}\n{stage.error}"


def _watched(watch: Facts) -> str:
    """Both versions while a promotion is watched, and what would have been noticed."""
    figures, adapter = watch["figures"], watch["adapter"] or "the base model"
    share = f"{adapter} has {percent(watch['share'])} since {moment(watch['since'])} UTC"
    return f"{share}: {figures.summary}\n{figures.noticeable}"


def _server(server: Facts, *, with_noise: bool) -> str:
    """What it serves, since when, when it was checked, its error, and what was pulled from its call log."""
    parts = [server["condition"] or _UNCHECKED]
    if server["condition"]:
        parts += [f"serves {server['serves']}"] if server["serves"] else []
        times = ("since", server["since"]), ("checked", server["looked_at"] if with_noise else None)
        parts += [f"{name} {moment(at)} UTC" for name, at in times if at]
    return "\n".join(filter(None, (server["url"], ", ".join(parts), server["error"], _calls(server["calls"]))))


def _calls(calls: Facts) -> str:
    """What was pulled from a server's call log, and what is missing; empty before it was asked."""
    if calls["condition"] in ("", "off"):
        return "calls: not recorded (serving.call_log)" if calls["condition"] else ""
    now = [f"{calls['condition']} now"] if calls["condition"] != "ok" else []
    missing = [f"{calls[key]:,} {words}" for key, words in MISSING_CALLS.items() if calls[key]]
    return ", ".join([f"calls: {calls['calls']:,} pulled", *now, *missing])


def _prompts(prompts: PromptCounts) -> str:
    """The share of tasks with an exact prompt, and why the others have none."""
    if not prompts.tasks:
        return "none yet"
    text = f"{prompts.exact:,} of {prompts.tasks:,} exact ({prompts.exact / prompts.tasks:.0%})"
    return "; ".join(filter(None, (text, counted(prompts.inexact))))


def _judge(judge: Facts) -> str:
    """Its usage in all and by purpose."""
    usage = judge["usage"]
    parts = [
        f"{purpose} {quantity(used['calls'], 'call')}, {used['prompt_tokens'] + used['completion_tokens']:,} tokens"
        + (f", {money(used['cost'])}" if used["cost"] is not None else "")
        for purpose, used in judge["by_purpose"].items()
        if used["calls"]
    ]
    return "\n".join([spent(usage, 0, usage["cost"]), *(["; ".join(parts)] if parts[1:] else ())])


def _rounds(status: Facts, most: int | None, *, with_noise: bool) -> Iterator[Fact]:
    """The newest rounds, at most so many, and those that run or wait."""
    live = status["live_round"] or {"round": "", "progress": None}
    progress = live["progress"]
    if progress is not None and not with_noise:
        progress = progress.model_copy(update={"rollouts": 0, "tokens_per_second": None, "seconds_left": None})
    older = 0 if most is None else len(status["rounds"]) - most
    for number, entry in enumerate(status["rounds"]):
        is_live, waits = entry["round"] == live["round"], entry.get("waits_for")
        if number < older and not is_live and not waits:
            continue
        first, last, means = entry["reward_first"], entry["reward_last"], entry["comparison"]
        parts = [progress.summary if is_live and progress is not None else entry["state"]]
        if waits:
            until = f" until {moment(entry['waits_until'])} UTC" if "waits_until" in entry else ""
            parts.append(f"waits for {waits}{until}")
        if first is not None and last is not None and not is_live:
            parts.append(f"reward {first:.2f} → {last:.2f}")
        if means is not None:
            parts.append(f"held-out score {means.deployed_mean:.2f} → {means.candidate_mean:.2f}")
        name = f"{entry['round']} ({entry['target']})" if "target" in entry else entry["round"]
        yield name, f"{', '.join(parts)}\n{entry['reason'] or entry['trigger']}"
