"""`flywheel train`: a round on a file by hand, without a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand

from flywheel.cli import progress_bars
from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    command_group,
    find_config,
    given_settings,
    print_error,
    print_json,
    run_async,
)
from flywheel.cli.tables import criterion_lines
from flywheel.config.command_lines import data_set
from flywheel.config.training import Stage
from flywheel.daemon.file_round import TuneResult
from flywheel.daemon.rounds.file_tasks import sentence_of
from flywheel.daemon.stage_round import StageRound, prepare
from flywheel.errors import EXIT_FAILED
from flywheel.system.signals import unless_cancelled
from flywheel.system.terminal import escape_terminal, quantity
from flywheel.training.data.round_progress import read_steps

train = command_group("train", "Train an adapter on a file by hand, without a daemon.")

STAGES: Final[Mapping[Stage, str]] = {
    "sft": "Train on the replies of a file, word by word (SFT).",
    "dpo": "Train on pairs of a better and a worse reply (DPO): those of a file, or rollouts that a rubric grades.",
    "grpo": "Train on rollouts of the model, rewarded by a rubric (GRPO).",
}
"""The commands, and what is said of each."""
LACKING: Final = {"sft": ("steps", "num_samples", "beta"), "dpo": ("steps",), "grpo": ()}
"""The options that a stage does not have."""


class StageCommand(TyperCommand):
    """A command of the stage that it is named after, with the options of that."""

    def __init__(self, name: str, *, params: list[Any], **attributes: Any) -> None:
        own = [each for each in params if each.name not in LACKING[name]]
        super().__init__(name, params=own, **attributes)


def _no_data_set(path: Path) -> Path:

    if why := data_set(str(path)):
        raise typer.BadParameter(f"{why}: name the file of its lines")
    return path


def train_on(
    context: typer.Context,
    data: Annotated[
        Path,
        typer.Option(
            callback=_no_data_set,
            metavar="DATA",
            help="Tasks, conversations or preferences: JSON lines, Parquet, CSV, a folder.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="The adapter goes here, the round's files to DIR.round.")
    ],
    base_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base model, a path or a hub name. Default: model.base.")
    ] = None,
    sft_model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The adapter to start from. Default: a new one.")
    ] = None,
    eval_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Held-out tasks. Default: some of DATA (ingest.train_ratio).")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="How often each row is used.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples, or prompts of GRPO, per optimizer step.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Share of steps (below 1) for learning-rate warm-up.")] = None,
    num_samples: Annotated[int | None, typer.Option(min=4, help="Rollouts per prompt.")] = None,
    beta: Annotated[
        float | None, typer.Option(help="KL strength: how closely the model is kept to its starting point.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of prompt and reply together.")
    ] = None,
    task_weights: Annotated[
        str | None, typer.Option(metavar="CLASS=SHARE,…", help="Relative numbers of rows (training.task_weights).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the round.")] = None,
    rubric: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The rubric that grades answers. Default: filter.rubric.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:

    given = context.params | {"data": None, "as_json": None, "config": find_config(config)}
    if task_weights is not None:
        pairs = (each.partition("=") for each in task_weights.split(","))
        given["task_weights"] = _each_once((name.strip(), share.strip()) for name, _, share in pairs)
    ready = prepare(cast("Stage", context.command.name), data, given, single=given_settings(), called=_option)
    made = run_async(_run(ready, quiet=as_json))
    report = _report(ready, made)
    rows = report["rows"]
    if rows["left_out"] > rows["trained"]:
        print_error(f"flywheel: more rows were skipped ({rows['left_out']:,}) than trained on ({rows['trained']:,})")
    if as_json:
        print_json(report)
    else:
        _print(escape_terminal(report))
    if made.adapter is None:
        raise typer.Exit(EXIT_FAILED)


for _stage, _about in STAGES.items():
    train.command(_stage, cls=StageCommand, help=_about)(train_on)


def _each_once(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, share in pairs:
        if name in found:
            why = f"{name} is given twice, as {found[name]} and as {share}"
            raise typer.BadParameter(why, param_hint="--task-weights")
        found[name] = share
    return found


def _option(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"


async def _run(ready: StageRound, *, quiet: bool) -> TuneResult:
    """Run the round. A signal stops its worker. Raises StoppedError and TrainError."""
    left = f"The same command goes on with it; its files are in {ready.directory}."
    async with progress_bars.beside(progress_bars.of_round(ready.directory, quiet=quiet)):
        return await unless_cancelled(ready.run(), f"finish {ready.spec.round_id}", left)


def _report(ready: StageRound, made: TuneResult) -> dict[str, Any]:

    steps = read_steps(made.directory)

    def first_and_last(name: str) -> list[float]:
        values = [line[name] for line in steps if line.get(name) is not None]
        return [values[0], values[-1]] if values else []

    compared, spec, read = made.comparison, ready.spec, ready.read
    left_out = read.left_out | made.left_out
    trained, held_out = (sum(each.task_id not in left_out for each in tasks) for tasks in (spec.train, spec.held_out))
    return {
        "stage": spec.round_id,
        "adapter": str(made.adapter) if made.adapter is not None else None,
        "is_better": made.is_better if compared is not None else None,
        "reason": made.reason,
        "steps": made.steps,
        "loss": first_and_last("loss"),
        "held_out_loss": first_and_last("held_out_loss"),
        "rewards": [made.reward_first, made.reward_last] if made.reward_first is not None else [],
        "comparison": compared.model_dump(mode="json", exclude={"scores"}) if compared is not None else None,
        "directory": str(made.directory),
        "rows": {"read": len(read.places), "trained": trained, "held_out": held_out, "left_out": len(left_out)},
        "left_out": read.by_reason(left_out.items()),
        "notes": read.by_reason([*read.notes, *made.partly.items()]),
    }


def _print(report: dict[str, Any]) -> None:

    if report["adapter"] is None:
        print_error(f"flywheel: {report['stage']} made no adapter: {report['reason']}")
    else:
        typer.echo(f"{report['adapter']}: adapter after {quantity(report['steps'], 'step')} of {report['stage']}")
    of_pairs = (("loss", "loss"), ("held_out_loss", "loss on held-out replies"), ("rewards", "mean reward"))
    for name, words in of_pairs:
        if report[name]:
            typer.echo(f"{words} {report[name][0]:.3f} → {report[name][1]:.3f}")
    if comparison := report["comparison"]:
        typer.echo(
            f"held-out score {comparison['deployed_mean']:.3f} → {comparison['candidate_mean']:.3f} on "
            f"{quantity(comparison['tasks'], 'task')} (gain {comparison['lower']:+.3f} … {comparison['upper']:+.3f})"
        )
        for line in criterion_lines(comparison):
            typer.echo(line)
    if report["adapter"] is not None:
        typer.echo(report["reason"])
    rows = report["rows"]
    counts = "{trained:,} trained on, {held_out:,} held out, {left_out:,} left out".format_map(rows)
    typer.echo(f"{quantity(rows['read'], 'row')}: {counts}")
    for name, words in (("left_out", "left out"), ("notes", "note")):
        for each in report[name]:
            typer.echo(f"{words}: {sentence_of(each)}")
    typer.echo(f"files of the round: {report['directory']}")
