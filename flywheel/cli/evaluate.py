"""`flywheel evaluate`: measure any model on a benchmark by the rubric, or compare two."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

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
from flywheel.errors import EXIT_USAGE, ConfigError, FlywheelError
from flywheel.records.states import Split
from flywheel.system.terminal import escape_terminal, excerpt, quantity

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flywheel.config.file import Config
    from flywheel.daemon.evaluation import Evaluation
    from flywheel.daemon.evaluation_answers import Answer, Answers
    from flywheel.daemon.judging.quality_bar import Case

HELD_OUT: Final = Split.HELD_OUT.value
FLIPS_SHOWN: Final = 5
EXCERPT: Final = 240
"""Characters of a question or an answer of a flip."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line asks for. `against` may be the directory of an earlier evaluation."""

    model: str
    base_url: str | None
    api_key_env: str
    against: str | None
    against_base_url: str | None
    benchmark: str
    limit: int | None
    samples: int
    target: str | None


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="What to measure: base, an alias (what is deployed), an adapter such as r0007, the folder of an"
            " adapter or a model, or with --base-url the name of a model there.",
        ),
    ],
    benchmark: Annotated[
        str, typer.Option(metavar="held-out|FILE", help="The tasks: those that the gate uses, or a file.")
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
        bool, typer.Option("--estimate", help="Estimate the judge's calls, tokens and cost, and ask nobody.")
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
    asked = _Asked(model, base_url, api_key_env, against, against_base_url, benchmark, limit, samples, target)
    plan = run_async(_plan(asked, settings, metrics))
    if estimate:
        shown = {"estimate": plan.estimate()}
        print_json(shown) if as_json else _print_estimate(plan)
        return
    report = run_async(plan.run(quiet=quiet or as_json))
    shown = report.json()
    quality = None
    if bar.is_asked:
        failures = report.cut_off[:1] if bar.fail_under is not None and report.is_mostly_cut_off else []
        quality = bar.report(report.cases, notes=report.notes, failures=failures)
        shown["quality"] = quality.json()
    if as_json:
        print_json(shown)
    elif not quiet:
        typer.echo("".join(f"{line}\n" for line in report.lines(shown)), nl=False)
        if quality is not None:
            typer.echo(f"quality: {quality.sentence}")
    for warning in report.cut_off:
        if quality is None or warning not in quality.failures:
            complain(f"warning: {warning}")
    error: FlywheelError | None = report.answers.judge_error or (quality.error if quality is not None else None)
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


async def _plan(asked: _Asked, config: Config, metrics: str | None) -> _Plan:
    """What is to be measured. Raises FlywheelError, before anything is paid for."""

    def found(conn: Connection | None) -> _Plan:
        return _planned(asked, config, metrics, conn)

    if asked.benchmark == HELD_OUT or not missing_state(config):
        return await read_state(config, found, warn=False)
    return found(None)


def _planned(asked: _Asked, config: Config, metrics: str | None, conn: Connection | None) -> _Plan:
    from flywheel.daemon import evaluation
    from flywheel.daemon.judging.judge_setup import rubric_of, rubric_of_target
    from flywheel.judge.agent_metrics import requested_metrics
    from flywheel.store.verdicts import usage_of_judge

    targets = config.by_target()
    if asked.target is not None and asked.target not in targets:
        hint = f"The targets are {', '.join(targets)}." if config.targets else "The configuration has no `targets`."
        raise ConfigError("evaluate a model", f"there is no target {asked.target}", hint)
    named = next((own for own in targets.values() if own.model.alias == asked.model), None)
    own = targets[asked.target] if asked.target is not None else named or next(iter(targets.values()))
    settings = evaluation.evaluation_settings(own, asked.samples)
    rubric = rubric_of_target(own, rubric_of(own))
    criteria = [criterion.id for criterion in rubric.every]
    names = requested_metrics(metrics or "all", criteria)
    if asked.benchmark == HELD_OUT:
        assert conn is not None
        benchmark = evaluation.held_out_tasks(conn, settings, asked.limit)
    else:
        benchmark = evaluation.tasks_of_file(absolute(Path(asked.benchmark)), settings, asked.limit)

    def of(name: str, url: str | None) -> Evaluation:
        if url is not None:
            remote = evaluation.remote_model(url, name, os.environ.get(asked.api_key_env, ""))
            measured = evaluation.EvaluatedModel(name, remote=remote)
        else:
            measured = evaluation.model_named(name, settings, conn)
        made = evaluation.Evaluation(measured, benchmark, rubric, settings)
        made.check()
        return made

    ours, theirs, earlier = of(asked.model, asked.base_url), None, None
    if asked.against is not None:
        folder = Path(asked.against).expanduser().absolute()
        if asked.against_base_url is None and evaluation.is_evaluation(folder):
            earlier = folder
        else:
            theirs = of(asked.against, asked.against_base_url)
    used = dict.fromkeys(("calls", "prompt_tokens", "completion_tokens", "estimated_tokens"), 0)
    if conn is not None:
        used = usage_of_judge(conn, ours.judge_hash)
    return _Plan(ours, theirs, earlier, ("score", *names), metrics is not None, used)


@dataclass(frozen=True, slots=True)
class _Plan:
    """`ours` is compared with `theirs`, or with the answers in the directory `earlier`. Metrics that are not
    `requested` are shown only if they are measured. `used` is what the judge's earlier calls used."""

    ours: Evaluation
    theirs: Evaluation | None
    earlier: Path | None
    metrics: tuple[str, ...]
    requested: bool
    used: dict[str, int]

    def estimate(self) -> dict[str, Any]:
        # Both have the same tasks and the same judge.
        models = sum(each is not None and not each.is_known for each in (self.ours, self.theirs))
        tasks = len(self.ours.benchmark.tasks)
        answers = models * tasks * (self.ours.settings.gate.samples or 1)
        return {"tasks": tasks, "answers": answers, **self.ours.estimate(self.used, models).json()}

    async def run(self, *, quiet: bool) -> _Report:
        answers = await _answers(self.ours, quiet=quiet)
        theirs: Answers | None = None
        if self.theirs is not None:
            theirs = await _answers(self.theirs, quiet=quiet)
        elif self.earlier is not None:
            from flywheel.daemon.evaluation_answers import answers_in

            theirs = answers_in(self.earlier)
        return _Report(self, answers, theirs)


async def _answers(evaluation: Evaluation, *, quiet: bool) -> Answers:
    """Let a model answer, with its progress on stderr. Raises FlywheelError."""
    from flywheel.cli import progress_bars
    from flywheel.daemon.judging.judging_report import cost_of
    from flywheel.judge.usage import UsageFile
    from flywheel.system.signals import unless_cancelled

    if evaluation.is_known and not quiet:
        complain(f"{evaluation.model.name}: measured before, in {short_path(str(evaluation.directory))}")
    elif evaluation.goes_on and not quiet:
        complain(f"{evaluation.model.name}: it goes on with the answers of an earlier run")
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
        attempted, left = f"evaluate {evaluation.model.name}", "The same command goes on with its answers."
        return await unless_cancelled(evaluation.run(), attempted, left)


@dataclass(frozen=True, slots=True)
class _Report:
    plan: _Plan
    answers: Answers
    theirs: Answers | None

    @property
    def cases(self) -> list[Case]:
        """A case for each answer; of several to one task, with its number."""
        rubric = self.plan.ours.rubric.id
        return [
            _case(rubric, name if len(own) == 1 else f"{name} ({number})", answer)
            for name, own in self.answers.by_task.items()
            for number, answer in enumerate(own, 1)
        ]

    @property
    def notes(self) -> list[str]:
        """What the summary says beside the cases."""
        named = f"{self.plan.ours.model.name} on {self.plan.ours.benchmark.name}"
        return [named, *self._failures, *self._left_out, *self.cut_off]

    @property
    def is_mostly_cut_off(self) -> bool:
        every = self.answers.every
        return 2 * sum(answer.is_cut_off for answer in every) > len(every)

    @property
    def cut_off(self) -> list[str]:
        """How many answers of each model were cut off without text, and by which setting."""
        sides = ((self.plan.ours, self.answers), (self.plan.theirs, self.theirs))
        return [_cut_off(model, answers) for model, answers in sides if model and answers and _cut(answers)]

    @property
    def _failures(self) -> list[str]:
        found = [answer for answer in self.answers.every if answer.failed]
        if not found:
            return []
        why = excerpt(escape_terminal(found[0].failed), EXCERPT)
        return [f"{quantity(len(found), 'answer')} failed and counted 0; the first, {found[0].task.task_id}: {why}"]

    @property
    def _left_out(self) -> list[str]:
        found = self.answers.left_out
        if not found:
            return []
        task, why = next(iter(found.items()))
        return [f"{quantity(len(found), 'task')} cannot be asked; the first, {task}: {why}"]

    def json(self) -> dict[str, Any]:
        from flywheel.daemon.judging.judging_report import cost_of

        ours, answers = self.plan.ours, self.answers
        seed, every, usage = ours.settings.training.seed, answers.every, answers.result.usage
        calls = {name: usage.get(f"judge_{name}", 0) for name in ("calls", "prompt_tokens", "completion_tokens")}
        return {
            "model": ours.model.json(),
            "benchmark": {"name": ours.benchmark.name, "tasks": len(answers.by_task), "left_out": answers.left_out},
            "rubric": {"id": ours.rubric.id, "hash": ours.rubric.hash},
            "answers": len(every),
            "accepted": sum(answer.accepted is True for answer in every),
            "rejected": sum(answer.accepted is False for answer in every),
            "undecided": sum(answer.accepted is None for answer in every),
            "failed": sum(bool(answer.failed) for answer in every),
            "cut_off": len(_cut(answers)),
            "metrics": {name: asdict(answers.summary(name, seed)) for name in self.plan.metrics},
            "against": self._against(seed),
            "usage": {**calls, "tokens_generated": usage.get("rollout_tokens") or usage.get("completion_tokens", 0)},
            "cost": cost_of(**calls, prices=ours.settings.judge.prices).price,
            "seconds": answers.result.seconds,
            "directory": str(ours.directory),
        }

    def _against(self, seed: int) -> dict[str, Any] | None:
        from flywheel.daemon.evaluation_answers import difference, flips

        if self.theirs is None:
            return None
        named = self.plan.theirs.model.json() if self.plan.theirs is not None else {"name": str(self.plan.earlier)}
        return {
            "model": named,
            "metrics": {name: asdict(self.theirs.summary(name, seed)) for name in self.plan.metrics},
            "differences": {name: difference(name, self.answers, self.theirs, seed) for name in self.plan.metrics},
            "flips": [
                {
                    "task_id": one.task.task_id,
                    "query": excerpt(one.task.exchange.query, EXCERPT),
                    "ours": _side(one),
                    "theirs": _side(other),
                }
                for one, other in flips(self.answers, self.theirs)
            ],
        }

    def lines(self, shown: dict[str, Any]) -> list[str]:
        """The report for people."""
        shown = escape_terminal(shown)
        metrics = shown["metrics"]
        if not self.plan.requested:
            metrics = {name: each for name, each in metrics.items() if each["count"]}
        title = f"{shown['model']['name']} on {_benchmark_name(shown['benchmark']['name'])}"
        counts = [f"{shown[name]:,} {name}" for name in ("accepted", "rejected", "undecided")]
        found = [
            f"{title}: {quantity(shown['answers'], 'answer')} to {quantity(shown['benchmark']['tasks'], 'task')}",
            ", ".join(counts),
            *self._failures,
            *self._left_out,
            *metric_lines(metrics),
        ]
        if (against := shown["against"]) is not None:
            found += ["", f"{shown['model']['name']} − {short_path(against['model']['name'])}, on the same tasks:"]
            width = max(map(len, metrics))
            found += [f"{name:<{width}}  {_difference(against['differences'][name])}" for name in metrics]
            found += _flip_lines(against["flips"])
        found += ["", f"judge: {spent(shown['usage'], 0, shown['cost'])}", f"files: {short_path(shown['directory'])}"]
        return found


def _cut(answers: Answers) -> list[Answer]:
    return [answer for answer in answers.every if answer.is_cut_off]


def _cut_off(evaluation: Evaluation, answers: Answers) -> str:
    found, rollout = _cut(answers), evaluation.settings.rollout
    limit = "serving.max_model_len"
    if evaluation.model.remote is not None:
        limit = "the endpoint's own limit of tokens (its default for max_tokens, or its context)"
    limit += f" or rollout.timeout_seconds ({rollout.timeout_seconds:g}) ended them"
    if all(answer.line["turns"] >= rollout.max_turns for answer in found):
        limit = f"rollout.max_turns ({rollout.max_turns}) ended them"
    were = "was" if len(found) == 1 else "were"
    every = quantity(len(answers.every), "answer")
    return f"{len(found):,} of {every} of {evaluation.model.name} {were} cut off without text: {limit}"


def _case(rubric: str, name: str, answer: Answer) -> Case:
    from flywheel.daemon.judging.quality_bar import Case, CaseOutcome

    outcomes = {True: CaseOutcome.ACCEPTED, False: CaseOutcome.REJECTED, None: CaseOutcome.UNDECIDED}
    failed = (
        f"{each['criterion']}: {each['choice']}" + (f" ({each['reason']})" if each["reason"] else "")
        for each in answer.line["criteria"]
        if not each["passed"]
    )
    why = f"no answer: {answer.failed}" if answer.failed else answer.line["error"]
    why = why or ("cut off without text" if answer.is_cut_off else "")
    return Case(rubric, name, outcomes[answer.accepted], answer.values["score"], tuple(failed), why)


def _side(answer: Answer) -> dict[str, Any]:
    """One of the two answers of a flip."""
    return {
        "accepted": answer.accepted,
        "score": answer.values["score"],
        "answer": excerpt(answer.line["answer"], EXCERPT),
        "failed": [each["criterion"] for each in answer.line["criteria"] if not each["passed"]],
        "error": answer.line["error"],
    }


def _benchmark_name(name: str) -> str:
    return "held-out tasks" if name == HELD_OUT else short_path(name)


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


def _print_estimate(plan: _Plan) -> None:
    found = plan.estimate()
    typer.echo(f"{quantity(found['tasks'], 'task')}, {quantity(found['answers'], 'answer')} to generate")
    typer.echo(f"judge: {estimated(found)}")
    if found["calls"]:
        typer.echo(f"({estimate_basis(found)})")
