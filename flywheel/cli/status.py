"""`flywheel status`: all of it, or with `--watch` as much as fits the screen.

No line is cut. A screen that is too small loses, in this order: the details of sources and servers, older rounds, all
rounds, and the single sources and servers, which are then counted by their condition.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from msgspec.structs import asdict, replace

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
from flywheel.system.terminal import escape_terminal, moment, percent, quantity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from flywheel.daemon.status import (
        CallsStatus,
        JudgeStatus,
        RoundStatus,
        ServerStatus,
        SourceStatus,
        Status,
        TargetStatus,
    )
    from flywheel.daemon.watch_figures import WatchStatus
    from flywheel.store.samples import PromptCounts
    from flywheel.store.stages import StageRecord

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

    def look() -> Status:
        missing = missing_state(settings)
        return run_async(read_state(settings, lambda conn: snapshot(conn, settings, missing), warn=False))

    if as_json:
        print_json(look().as_json())
    elif metrics:
        from flywheel.daemon.prometheus import exposition

        binary_stdout().write(exposition(look()))
    elif watch:
        _watch(look)
    else:
        _print(look())


def _print(status: Status) -> None:
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(_with_rounds(_facts(status), status, len(status.rounds), console.width))
    else:
        typer.echo(_text(status))


def _watch(look: Callable[[], Status]) -> None:
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
        status = look()
        if (now := _text(_without_noise(status))) != before:
            typer.echo(f"\n{_text(status)}" if before else _text(status))
            sys.stdout.flush()
            before = now
        time.sleep(WATCH_SECONDS)


def _without_noise(status: Status) -> Status:
    """Without the times when servers were checked and the single rollouts of a step, which change all the time."""
    live = status.live_round
    if live is not None and live.progress is not None:
        rarely_changed = live.progress.model_dump(include={"phase", "step", "steps", "paused"})
        live = replace(live, progress=type(live.progress)(**rarely_changed))
    quiet = {
        name: replace(own, replicas=[replace(server, looked_at=None) for server in own.replicas])
        for name, own in status.targets.items()
    }
    return replace(status, targets=quiet, live_round=live)


def fitted(status: Status, console: Console) -> RenderableType:
    """The most detailed form that the terminal has lines for."""
    rounds, width = len(status.rounds), console.width
    hint: Fact = ("", "(shortened to fit this screen: `flywheel status` shows everything)")
    short, counts = _facts(status, "short"), _facts(status, "counts")
    for form in (
        _with_rounds(_facts(status), status, rounds, width),
        *(_with_rounds([*short, hint], status, most, width) for most in (rounds, FEW_ROUNDS, 0)),
        facts_grid([*counts, hint]),
    ):
        if len(console.render_lines(form, pad=False)) < console.height:
            return form
    # On a terminal of a few lines, what may need attention comes first.
    return facts_grid(reversed(counts))


def _facts(status: Status, form: Literal["whole", "short", "counts"] = "whole") -> list[Fact]:
    """Sources and servers are described in several lines or in one each, or are counted by their conditions."""
    missing, letters, recent, live = status.no_state, status.dead_letters, status.recent_verdicts, status.live_round
    excluded = list[Fact]()
    if form == "whole":
        sources = [("source", source_text(asdict(source))) for source in status.sources]
        servers = [("server", _server_text(server)) for server in status.servers]
        shortfalls = {name: own.gate.shortfall for name, own in status.targets.items()}
        excluded = [
            *(("gate", _of(name, text)) for name, text in shortfalls.items() if text),
            *(("excluded", f"{quantity(each.tasks, 'task')}: {each.why}\n{each.do}") for each in status.left_out),
        ]
    elif form == "short":
        sources = [("source", _source_line(source)) for source in status.sources]
        servers = [("server", f"{server.url}: {_serves(server)}") for server in status.servers]
    else:
        of_sources = (
            (source.condition or "not read yet") if source.configured else "not in the configuration"
            for source in status.sources
        )
        sources = [("sources", _conditions(of_sources))]
        servers = [("servers", _conditions(server.condition or _UNCHECKED for server in status.servers))]
    facts: list[Fact] = [
        *(("WARNING", text) for text in status.warnings),
        ("daemon", f"running (process {status.daemon.pid})" if status.daemon.pid else "not running"),
        ("state", missing or short_path(status.state_dir)),
        *sources,
        ("replies", counted(status.replies) or "none yet"),
        ("skipped", counted(status.skipped) or "none"),
        ("tasks", counted(status.tasks) or "none yet"),
    ]
    if form != "counts":
        facts.append(("prompts", _prompts(status.prompts)))
    if recent.judged:
        facts.append(("verdicts", f"last {recent.judged:,}: {recent.accepted:,} accepted"))
        if recent.rejected_by:
            facts.append(("verdicts", f"rejected by {counted(recent.rejected_by)}"))
    facts += [
        *(("samples", text) for text in (_sample_counts if form == "counts" else _samples)(status)),
        *excluded,
        ("judge", _judge(status.judge)),
        *(("failing", _failing(name, each)) for name, each in status.stages.items() if each.failing_since),
        *(
            ("deployed", f"{own.deployment.alias} → {own.deployment.adapter or 'the base model'}")
            for own in status.targets.values()
        ),
        *(("watched", _watched(own.watch)) for own in status.targets.values() if own.watch is not None),
        *servers,
    ]
    facts += [
        ("round", f"{_named(each)}: passed, waits for {each.waits_for}{_until(each.waits_until)}")
        for each in status.rounds
        if each.waits_for
    ]
    if live is not None:
        facts.append(("round", f"{_named(live)}: {live.progress.summary if live.progress else live.state}"))
    if (sent := status.langfuse) is not None:
        counts = f"{quantity(sent.sent, 'score')} sent, {sent.refused:,} refused"
        untraced = f"{quantity(sent.untraced, 'reply', 'replies')} without a trace of OpenTelemetry"
        facts.append(("langfuse", f"{sent.server}: {counts}, {untraced}"))
    if status.next_cron_times:
        facts.append(("cron", f"next at {', '.join(f'{moment(at)} UTC' for at in status.next_cron_times)}"))
    facts += [
        ("waiting", status.waiting_for or "–"),
        ("dead letters", f"{letters:,} open: see `flywheel dead-letters`" if letters else "none"),
        ("ledger", "–" if missing else "balanced" if status.balanced else "NOT balanced: run `flywheel audit`"),
    ]
    return [(name, escape_terminal(text)) for name, text in facts]


def _until(at: str | None) -> str:
    return f" until {moment(at)} UTC" if at else ""


def _source_line(source: SourceStatus) -> str:
    counts = f"{quantity(source.replies, 'reply', 'replies')}, {quantity(source.tasks, 'task')}"
    if source.private_traces:
        counts += f", {quantity(source.private_traces, 'private trace')} not stored"
    return f"{short_path(source.path)}: {source_condition(asdict(source))}, {counts}"


def _failing(name: str, stage: StageRecord) -> str:
    again = f", is tried again at {moment(stage.waits_until)} UTC" if stage.waits_until else ""
    return f"{name} since {moment(stage.failing_since)} UTC{again}\n{stage.error}"


def _watched(watch: WatchStatus) -> str:
    """Both versions while a promotion is watched, and what would have been noticed."""
    share = f"{watch.adapter or 'the base model'} has {percent(watch.share)} since {moment(watch.since)} UTC"
    return f"{share}: {watch.figures.summary}\n{watch.figures.noticeable}"


_UNCHECKED: Final = "not checked yet (requires `flywheel run`)"


def _serves(server: ServerStatus) -> str:
    if not server.condition:
        return _UNCHECKED
    return f"{server.condition}, serves {server.serves}" if server.serves else server.condition


def _server_text(server: ServerStatus) -> str:
    """An inference server: what it serves, since when, when it was checked, and its error."""
    times = (("since", server.since), ("checked", server.looked_at))
    moments = [f"{name} {moment(at)} UTC" for name, at in times if server.condition and at]
    lines = (server.url, ", ".join((_serves(server), *moments)), server.error, _calls(server.calls))
    return "\n".join(filter(None, lines))


def _calls(calls: CallsStatus) -> str:
    """What was pulled from a server's call log, and what is missing; empty before it was asked."""
    if not calls.condition:
        return ""
    if calls.condition == "off":
        return "calls: not recorded (serving.call_log)"
    parts = [f"{calls.calls:,} pulled"]
    if calls.condition != "ok":
        parts.append(f"{calls.condition} now")
    if calls.missed:
        parts.append(f"{calls.missed:,} were pruned before")
    if calls.dropped:
        parts.append(f"{calls.dropped:,} could not be recorded")
    if calls.refused:
        parts.append(f"{calls.refused:,} were not to be recorded")
    if calls.to_erase:
        parts.append(f"{calls.to_erase:,} to be erased there")
    return f"calls: {', '.join(parts)}"


def _prompts(prompts: PromptCounts) -> str:
    """The share of tasks with an exact prompt, and why the others have none."""
    if not prompts.tasks:
        return "none yet"
    text = f"{prompts.exact:,} of {prompts.tasks:,} exact ({prompts.exact / prompts.tasks:.0%})"
    reasons = [f"{number:,} {_EXCLUDED[reason]}" for reason, number in prompts.inexact.items()]
    return "; ".join([text, *reasons])


def _conditions(conditions: Iterable[str]) -> str:
    counts = Counter(conditions)
    return f"{counts.total()}: {counted(counts)}"


def _judge(judge: JudgeStatus) -> str:
    """Its usage in all and by purpose."""
    from flywheel.cli.tables import spent

    usage = asdict(judge.usage)
    lines = [spent(usage, 0, asdict(judge.usage.cost) if judge.usage.cost else None)]
    parts = [
        f"{purpose} {quantity(used.calls, 'call')}, {used.prompt_tokens + used.completion_tokens:,} tokens"
        + (f", {money(asdict(used.cost))}" if used.cost is not None else "")
        for purpose, used in judge.by_purpose.items()
        if used.calls
    ]
    if len(parts) > 1:
        lines.append("; ".join(parts))
    return "\n".join(lines)


def _of(target: str, text: str) -> str:
    """A text about a target; without targets, as it is."""
    return f"{target}: {text}" if target else text


def _named(entry: RoundStatus) -> str:
    """A round, with its target if there are several."""
    return f"{entry.round} ({entry.target})" if entry.target else entry.round


def _sample_count(own: TargetStatus, purpose: str = " for the gate") -> str:
    text = f"{own.free_samples} free of {own.min_samples} needed, {own.held_out} held out{purpose}"
    conversations = quantity(own.gate.conversations, "conversation")
    return f"{text} ({conversations}, {own.gate.missing} more needed)" if own.gate.missing else text


def _sample_counts(status: Status) -> list[str]:
    """The same in one line each."""
    return [_of(name, _sample_count(own, "")) for name, own in status.targets.items()]


def _samples(status: Status) -> list[str]:
    """Counts of each target, why samples wait, and why tasks are excluded from rounds."""
    texts = []
    for name, own in status.targets.items():
        waiting = [f"{number:,} {why}" for why, number in own.waiting_samples.items()]
        texts.append(_of(name, "; ".join(filter(None, (_sample_count(own), own.new_samples.wait, *waiting)))))
    excluded = "; ".join(f"{each.tasks:,} excluded ({_EXCLUDED[each.reason]})" for each in status.left_out)
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
    "undefined": "no tool definitions in the trace",
    "model": "other model",
    "target": "agent of no target",
    "repeated": "repeated in training",
}
"""Why rounds exclude tasks, by `flywheel.records.exclusion.Exclusion`."""


def _rounds(status: Status) -> Iterator[tuple[str, ...]]:
    for entry in status.rounds:
        means, first, last = entry.comparison, entry.reward_first, entry.reward_last
        score = f"{means.deployed_mean:.2f} → {means.candidate_mean:.2f}" if means is not None else "–"
        reward = f"{first:.2f} → {last:.2f}" if first is not None and last is not None else "–"
        why = entry.reason or entry.trigger
        yield tuple(escape_terminal(text) for text in (_named(entry), entry.state, reward, score, why))


def _with_rounds(facts: list[Fact], status: Status, most: int, width: int) -> RenderableType:
    """The facts and the newest rounds: in a table, or as facts on a narrow terminal."""
    from rich.console import Group

    rounds = list(islice(_rounds(status), most))
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


def _text(status: Status) -> str:
    rounds = (ROUND_COLUMNS, *_rounds(status)) if status.rounds else ()
    return "\n".join([facts_text(_facts(status)), *("\t".join(row) for row in rounds)])
