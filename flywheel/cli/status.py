"""`flywheel status`, `audit` and `why`: looking, without touching anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    app,
    binary_stdout,
    load_config,
    missing_state,
    print_json,
    read_state,
    read_state_or_warn,
    run_async,
)
from flywheel.cli.tables import criterion_lines
from flywheel.errors import EXIT_FAILED, StoreError
from flywheel.process_tuning import tune_malloc
from flywheel.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.config import Config
    from flywheel.diagnostics.audit import DeepAudit
    from flywheel.store.balance import Balance


@app.command()
def status(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second, until Ctrl-C.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print it in Prometheus' text format.")] = False,
) -> None:
    """Show sources, funnel, rounds and what is deployed."""
    from flywheel.daemon.status import snapshot

    if watch + as_json + metrics > 1:
        raise typer.BadParameter(
            "give one of --json, --metrics and --watch", param_hint="--watch" if watch else "--json"
        )
    settings = load_config(config)

    def look() -> dict[str, Any]:
        return run_async(read_state(settings, lambda conn: snapshot(conn, settings))) | {
            "no_state": missing_state(settings)
        }

    if as_json:
        print_json(look())
        return
    if metrics:
        from flywheel.daemon.prometheus import exposition

        binary_stdout().write(exposition(look()))
        return
    from flywheel.cli import status_view

    if watch:
        status_view.watch(lambda: escape_terminal(look()))
    else:
        status_view.show(escape_terminal(look()))


@app.command()
def audit(
    config: ConfigOption = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare with the sources themselves and the task file as well.")
    ] = False,
    source: Annotated[
        list[Path] | None, typer.Option(metavar="DB", help="With --deep: this database, not the configured ones.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that every reply is accounted for; exit 1 if one is not."""
    settings = load_config(config)
    if source and not deep:
        raise typer.BadParameter("it belongs to --deep", param_hint="--source")
    if source:
        from flywheel.config import StudioSource

        settings = settings.model_copy(update={"sources": [StudioSource(path=absolute(path)) for path in source]})
    tune_malloc()
    books, found = run_async(_audit(settings, deep=deep))
    problems = [*books.problems, *(found.problems if found else ())]
    missing = missing_state(settings)
    report = {
        "balanced": books.balanced,
        "replies": books.replies,
        **books.ends,
        "reply_states": books.reply_states,
        "task_states": books.task_states,
        "skip_reasons": books.skipped,
        **(found.as_json() if found else {}),
        "no_state": missing,
        "problems": problems,
    }
    if as_json:
        print_json(report)
    else:
        typer.echo(
            f"{quantity(books.replies, 'reply', 'replies')} = "
            + " + ".join(f"{number:,} {end}" for end, number in books.ends.items())
        )
        for line in found.lines if found else ():
            typer.echo(escape_terminal(line, one_line=True))
        for problem in problems:
            typer.echo(f"wrong: {escape_terminal(problem, one_line=True)}")
        beyond = len(problems) - len(books.problems)
        told = "balanced, but for what is wrong beyond the ledger" if beyond else "balanced"
        typer.echo(missing or (told if books.balanced else "NOT balanced"))
    if problems:
        raise typer.Exit(EXIT_FAILED)


async def _audit(config: Config, *, deep: bool) -> tuple[Balance, DeepAudit | None]:
    from flywheel.store.balance import balance
    from flywheel.store.database import Store

    store = await Store.view(config.state_dir)
    try:
        books = await store.read(balance)
        if not deep:
            return books, None
        from flywheel.diagnostics.audit import deep_audit

        return books, await deep_audit(store, config)
    finally:
        await store.close()


@app.command()
def why(
    subject: Annotated[str, typer.Argument(metavar="ID", help="An adapter, task, trace, span or conversation.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell which conversations made an adapter, or what became of a trace."""
    from flywheel.store.lineage import why as tell

    story = run_async(read_state_or_warn(load_config(config), lambda conn: tell(conn, subject)))
    if story is None:
        raise StoreError(
            f"explain {subject}",
            "no adapter, task, trace, span or conversation has this id",
            "Ids are in tasks.jsonl, in `flywheel filter` and in `flywheel status`.",
        )
    if as_json:
        print_json(story)
        return
    story = escape_terminal(story, one_line=True)
    if story["kind"] == "round":
        _print_round(story)
    else:
        for reply in story["replies"]:
            _print_reply(reply)


def _print_round(story: dict[str, Any]) -> None:
    typer.echo(f"{story['id']}: {story['state']}{' – ' + story['reason'] if story['reason'] else ''}")
    typer.echo(f"started because: {story['trigger']}; attempt {story['attempt']}, seed {story['seed']}")
    typer.echo(f"continues: {story['parent'] or 'the base model'}")
    if story["adapter"]:
        removed = ", its files were removed" if story["adapter"]["state"] == "removed" else ""
        typer.echo(f"adapter: {story['adapter']['path']} (sha256 {story['adapter']['sha256'][:12]}…{removed})")
    if comparison := story["comparison"]:
        means = f"{comparison['deployed_mean']:.3f} → {comparison['candidate_mean']:.3f}"
        gain = f"{comparison['gain']:+.3f} ({comparison['lower']:+.3f} … {comparison['upper']:+.3f})"
        typer.echo(f"held-out: {means} on {quantity(comparison['tasks'], 'task')}, gain {gain}")
        for line in criterion_lines(comparison):
            typer.echo(line)
    if usage := story["usage"]:
        typer.echo(
            f"judged: {usage['judge_calls']:,} calls for {usage['rollouts']:,} rollouts,"
            f" {usage['judge_prompt_tokens']:,} tokens sent, {usage['judge_completion_tokens']:,} received"
        )
    for entry in story["deployments"]:
        typer.echo(f"deployed as {entry['alias']}: {entry['state']} since {entry['activated_at'] or '–'}")
    conversations = quantity(len(story["conversations"]), "conversation")
    typer.echo(f"made of {quantity(len(story['samples']), 'sample')} from {conversations}:")
    for sample in story["samples"]:
        typer.echo(f"  {sample['task_id']}  {sample['conversation_id']}  {sample['agent']}")
    for task, reason in story["left_out"].items():
        typer.echo(f"left out {task}: {reason}")


def _print_reply(reply: dict[str, Any]) -> None:
    whose = ", ".join(filter(None, (reply["agent"], reply["source"])))
    typer.echo(f"span {reply['span_id']} of trace {reply['trace_id']} ({whose})")
    task = reply["task"]
    if task is None:
        typer.echo(f"  {reply['state']}: {reply['skip_reason'] or ''} {reply['detail']}".rstrip())
        return
    typer.echo(f"  task {task['task_id']}: {task['state']}, {task['split']}")
    if repeats := task["repeats"]:
        typer.echo(f"  repeats {repeats['task_id']} ({repeats['method']}, {repeats['similarity']:.2f})")
    for left_out in task["left_out"]:
        typer.echo(f"  left out of rounds: {left_out['why']}")
    for verdict in task["verdicts"]:
        score = "–" if verdict["score"] is None else f"{verdict['score']:.2f}"
        typer.echo(f"  verdict: {verdict['outcome']} ({score}) {verdict['reason'] or verdict['error']}")
    for used in task["rounds"]:
        typer.echo(f"  {used['round']} ({used['state']}): {used['split']}")
