"""`flywheel evaluate`: measure any model on a benchmark by the rubric, or compare two."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from flywheel.cli import progress_bars
from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    app,
    complain,
    load_config,
    missing_state,
    print_json,
    read_state,
    require_outside_state,
    run_async,
)
from flywheel.cli.quality_bar import (
    ConfidenceOption,
    FailUnderOption,
    JunitOption,
    MaxUndecidedOption,
    MetricsOption,
    SummaryOption,
    metric_lines,
    quality_bar,
)
from flywheel.cli.tables import estimate_basis, estimated, money, short_path, spent
from flywheel.config.file import Config
from flywheel.daemon.evaluation import HELD_OUT, Evaluation
from flywheel.daemon.evaluation_answers import Answers
from flywheel.daemon.evaluation_report import Asked, Plan
from flywheel.daemon.judging.judging_report import cost_of
from flywheel.errors import EXIT_USAGE
from flywheel.judge.usage import UsageFile
from flywheel.system.signals import unless_cancelled
from flywheel.system.terminal import escape_terminal, quantity

FLIPS_SHOWN: Final = 5


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model to evaluate: `base`, an alias, a round (r0007), a local folder, or (with"
            " --base-url) a remote model name.",
        ),
    ],
    benchmark: Annotated[
        str, typer.Option(metavar="held-out|FILE", help="Tasks: the held-out tasks of the gate, or a file.")
    ],
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Any OpenAI-compatible endpoint that serves the model.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable with the endpoint's key.")
    ] = "OPENAI_API_KEY",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|DIR", help="Compare with this model, or with an earlier evaluation whose files are in DIR."
        ),
    ] = None,
    against_base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The endpoint that serves the model of --against.")
    ] = None,
    workflow: Annotated[
        str | None,
        typer.Option(metavar="FILE:FUNCTION", help="Let this agent answer with the model (rollout.agent.workflow)."),
    ] = None,
    rubric: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use this rubric instead of the configured one.", readable=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Answers to each task.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ask at most this many tasks.")] = None,
    metrics: MetricsOption = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="NAME", help="The target, if there are several.")
    ] = None,
    fail_under: FailUnderOption = None,
    confidence: ConfidenceOption = None,
    max_undecided: MaxUndecidedOption = None,
    junit: JunitOption = None,
    summary: SummaryOption = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate the judge's calls, tokens and cost without calling it.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a model answer the tasks of a benchmark, and measure its answers by the rubric."""
    bar = quality_bar(fail_under, confidence, max_undecided, junit, summary)
    wrong = {
        "--estimate judges nothing: use it without a quality bar and its reports": estimate and bar.is_asked,
        "--against-base-url is the endpoint of --against: name its model": against_base_url and not against,
    }
    for message in (message for message, is_so in wrong.items() if is_so):
        typer.echo(f"flywheel: {message}", err=True)
        raise typer.Exit(EXIT_USAGE)
    settings = load_config(config, options=_options(workflow, rubric))
    require_outside_state(settings, junit, summary)
    key, tasks = (
        os.environ.get(api_key_env, ""),
        benchmark if benchmark == HELD_OUT else str(absolute(Path(benchmark))),
    )
    asked = Asked(model, base_url, key, against, against_base_url, tasks, limit, samples, target, metrics)
    plan = run_async(_plan(asked, settings))
    if estimate:
        shown = {"estimate": plan.estimate()}
        print_json(shown) if as_json else _print_estimate(shown["estimate"])
        return
    report = run_async(plan.run(partial(_answers, quiet=quiet or as_json)))
    shown = report.json()
    quality = report.quality(bar) if bar.is_asked else None
    if quality is not None:
        shown["quality"] = quality.json()
    if as_json:
        print_json(shown)
    elif not quiet:
        lines = _lines(escape_terminal(shown), report.notes, every_metric=metrics is not None)
        typer.echo("".join(f"{line}\n" for line in lines), nl=False)
        if quality is not None:
            typer.echo(f"quality: {quality.sentence}")
    for warning in report.cut_off:
        if quality is None or warning not in quality.failures:
            complain(f"warning: {warning}")
    error = report.answers.judge_error or (quality.error if quality is not None else None)
    if error is not None:
        complain(error)
        raise typer.Exit(error.exit_code)


def _options(workflow: str | None, rubric: Path | None) -> list[str]:
    """The settings that options stand for, as KEY=VALUE."""
    found = []
    if workflow is not None:
        file, colon, function = workflow.rpartition(":")
        named = f"{absolute(Path(file))}:{function}" if colon and file.endswith(".py") else workflow
        found.append(f"rollout.agent={json.dumps({'workflow': named})}")
    if rubric is not None:
        # The rubric of a chain would take its place.
        found += [f"filter.rubric={json.dumps(str(absolute(rubric)))}", "filter.chain=null"]
    return found


async def _plan(asked: Asked, config: Config) -> Plan:
    """What is to be measured, in the state if there is one, or if it has the tasks. Raises FlywheelError."""
    if asked.benchmark == HELD_OUT or not missing_state(config):
        return await read_state(config, partial(Plan.of, asked, config), warn=False)
    return Plan.of(asked, config, None)


async def _answers(evaluation: Evaluation, *, quiet: bool) -> Answers:
    """Let a model answer, with its progress on stderr. Raises FlywheelError."""
    if evaluation.is_known and not quiet:
        complain(f"{evaluation.model.name}: measured before, in {short_path(str(evaluation.directory))}")
    elif evaluation.goes_on and not quiet:
        complain(f"{evaluation.model.name}: reusing the answers of an earlier run")
    file, prices = UsageFile(evaluation.directory), evaluation.settings.judge.prices
    read, sent, received = 0, 0, 0

    def cost_so_far() -> str:
        nonlocal read, sent, received
        found, read = file.read(read)
        sent += sum(each.prompt_tokens for each in found)
        received += sum(each.completion_tokens for each in found)
        cost = cost_of(0, sent, received, prices).price
        return money(cost) if cost is not None else f"{sent + received:,} tokens of the judge"

    drawing = progress_bars.of_round(evaluation.directory, quiet=quiet, name=evaluation.model.name, more=cost_so_far)
    async with progress_bars.beside(drawing):
        attempted, left = (
            f"evaluate {evaluation.model.name}",
            "Run the same command again: it reuses the answers so far.",
        )
        return await unless_cancelled(evaluation.run(), attempted, left)


def _lines(shown: Mapping[str, Any], notes: Sequence[str], *, every_metric: bool) -> list[str]:
    """The report for people."""
    metrics = {name: each for name, each in shown["metrics"].items() if each["count"] or every_metric}
    measured, on = shown["model"]["name"], shown["benchmark"]["name"]
    title = f"{measured} on {'held-out tasks' if on == HELD_OUT else short_path(on)}"
    found = [
        f"{title}: {quantity(shown['answers'], 'answer')} to {quantity(shown['benchmark']['tasks'], 'task')}",
        ", ".join(f"{shown[name]:,} {name}" for name in ("accepted", "rejected", "undecided")),
        *notes,
        *metric_lines(metrics),
    ]
    if (against := shown["against"]) is not None:
        found += ["", f"{measured} − {short_path(against['model']['name'])}, on the same tasks:"]
        width = max(map(len, metrics))
        found += [f"{name:<{width}}  {_difference(against['differences'][name])}" for name in metrics]
        found += _flip_lines(against["flips"])
    return [
        *found, "", f"judge: {spent(shown['usage'], 0, shown['cost'])}", f"files: {short_path(shown['directory'])}"
    ]  # fmt: skip


def _difference(found: Mapping[str, Any]) -> str:
    if not found["tasks"]:
        return "not measured"
    reach = f"{found['lower']:+.3f} to {found['upper']:+.3f}"
    return f"{found['difference']:+.3f} ({reach}) on {quantity(found['tasks'], 'task')}"


def _flip_lines(flips: Sequence[Mapping[str, Any]]) -> list[str]:
    better = sum(flip["ours"]["accepted"] for flip in flips)
    found = ["", f"{len(flips):,} flip: {better:,} to accepted, {len(flips) - better:,} to rejected"]
    for flip in flips[:FLIPS_SHOWN]:
        found += [
            "",
            f"{flip['task_id']}  {'rejected → accepted' if flip['ours']['accepted'] else 'accepted → rejected'}",
        ]
        found += [f"  question  {flip['query']}", f"  before    {flip['theirs']['answer']}"]
        found.append(f"  now       {flip['ours']['answer']}")
        if why := flip["ours"]["error"] or ", ".join(flip["ours"]["failed"] or flip["theirs"]["failed"]):
            found.append(f"  criteria  {why}")
    if (more := len(flips) - FLIPS_SHOWN) > 0:
        found += ["", f"… and {more:,} more; `--json` lists them all"]
    return found


def _print_estimate(found: Mapping[str, Any]) -> None:
    typer.echo(f"{quantity(found['tasks'], 'task')}, {quantity(found['answers'], 'answer')} to generate")
    typer.echo(f"judge: {estimated(found)}")
    if found["calls"]:
        typer.echo(f"({estimate_basis(found)})")
