"""`flywheel train`: a round on a file by hand, without a daemon."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    absolute,
    command_group,
    find_config,
    given_settings,
    print_error,
    print_json,
    run_async,
)
from flywheel.cli.tables import criterion_lines, short_path
from flywheel.errors import EXIT_FAILED, TrainError
from flywheel.system.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.config.training import Stage
    from flywheel.daemon.file_round import TuneResult
    from flywheel.daemon.rounds.file_tasks import ReadRows
    from flywheel.records.round import RoundSpec

train = command_group("train", "Train an adapter on a file by hand, without a daemon.")


def _no_data_set(path: Path) -> Path:
    from flywheel.config.command_lines import data_set

    if why := data_set(str(path)):
        raise typer.BadParameter(f"{why}: name the file of its lines")
    return path


DataOption = Annotated[
    Path,
    typer.Option(
        "--data",
        callback=_no_data_set,
        metavar="DATA",
        help="Tasks, conversations or preferences: JSON lines, JSON, Parquet, CSV, or a folder.",
    ),
]
OutputOption = Annotated[
    Path,
    typer.Option("--output", metavar="DIR", help="The adapter goes here, the round's files to DIR.round."),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base-model", metavar="MODEL", help="The base model, a path or a hub name. Default: model.base."),
]
AdapterOption = Annotated[
    Path | None,
    typer.Option(
        "--sft-model", metavar="DIR", help="The adapter to start from. Default: a new one on the base model."
    ),
]
HeldOutOption = Annotated[
    Path | None,
    typer.Option(
        "--eval-data",
        metavar="FILE",
        help="Held-out tasks. Default: conversations of the others (ingest.train_ratio).",
    ),
]
RubricOption = Annotated[
    Path | None,
    typer.Option("--rubric", metavar="FILE", help="The rubric that grades answers. Default: filter.rubric."),
]
RateOption = Annotated[float | None, typer.Option("--learning-rate", help="Peak learning rate.")]
EpochsOption = Annotated[int | None, typer.Option("--epochs", min=1, help="How often each example is trained on.")]
SizeOption = Annotated[int | None, typer.Option("--batch-size", min=1, help="Examples per optimizer step.")]
LengthOption = Annotated[
    int | None, typer.Option("--max-length", min=1, help="Maximum tokens of prompt and reply together.")
]
SamplesOption = Annotated[int | None, typer.Option("--num-samples", min=4, help="Rollouts per prompt.")]


@dataclass(frozen=True, slots=True)
class Files:
    """The files and folders that the command line names."""

    data: Path
    held_out: Path | None
    output: Path
    rubric: Path | None
    config: Path | None


@train.command()
def sft(
    data: DataOption,
    output: OutputOption,
    base_model: BaseOption = None,
    eval_data: HeldOutOption = None,
    epochs: EpochsOption = None,
    batch_size: SizeOption = None,
    learning_rate: RateOption = None,
    max_length: LengthOption = None,
    rubric: RubricOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on the replies of a file, word by word (SFT)."""
    training = {"sft": {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}}
    files = Files(data, eval_data, output, rubric, config)
    _train("sft", training, base_model, None, max_length, files, as_json=as_json)


@train.command()
def dpo(
    data: DataOption,
    output: OutputOption,
    base_model: BaseOption = None,
    sft_model: AdapterOption = None,
    eval_data: HeldOutOption = None,
    epochs: EpochsOption = None,
    num_samples: SamplesOption = None,
    batch_size: SizeOption = None,
    beta: Annotated[
        float | None, typer.Option(help="How near the model is kept to the one that it starts from.")
    ] = None,
    learning_rate: RateOption = None,
    max_length: LengthOption = None,
    rubric: RubricOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on pairs of a better and a worse reply (DPO): those of a file, or rollouts that a rubric grades."""
    own = {"epochs": epochs, "batch_size": batch_size, "beta": beta, "learning_rate": learning_rate}
    files = Files(data, eval_data, output, rubric, config)
    training = {"dpo": own, "group_size": num_samples}
    _train("dpo", training, base_model, sft_model, max_length, files, as_json=as_json)


@train.command()
def grpo(
    data: DataOption,
    output: OutputOption,
    base_model: BaseOption = None,
    sft_model: AdapterOption = None,
    eval_data: HeldOutOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.")] = None,
    num_samples: SamplesOption = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Prompts per step.")] = None,
    beta: Annotated[float | None, typer.Option(help="Weight of the KL term.")] = None,
    learning_rate: RateOption = None,
    max_length: LengthOption = None,
    rubric: RubricOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on rollouts of the model, rewarded by a rubric (GRPO)."""
    training = {
        "steps": steps,
        "group_size": num_samples,
        "prompts_per_step": batch_size,
        "beta": beta,
        "learning_rate": learning_rate,
    }
    files = Files(data, eval_data, output, rubric, config)
    _train("grpo", training, base_model, sft_model, max_length, files, as_json=as_json)


def _train(
    stage: Stage,
    training: Mapping[str, Any],
    base_model: str | None,
    adapter: Path | None,
    max_length: int | None,
    files: Files,
    *,
    as_json: bool,
) -> None:
    from flywheel.daemon import file_round
    from flywheel.daemon.rounds.file_tasks import ReadRows

    output = _empty(absolute(files.output))
    adapter = absolute(adapter) if adapter is not None else None
    names = file_round.RoundNames(stage, f"train with {stage}", "--data", "--eval-data")
    options: dict[str, Any] = {
        "training": {**training, "stages": [stage]},
        "model": {"base": _base(base_model, adapter, names.attempted)},
        "rollout": {"max_model_len": max_length},
        # The rubric of a chain would take its place.
        "filter": {"rubric": str(absolute(files.rubric)), "chain": None} if files.rubric is not None else {},
    }
    settings = _settings(options, files.config, f"`train {stage}`")
    compares = file_round.has_rewards(settings)
    about: dict[str, Any] = {"parent": adapter, "compares": compares, "names": names, "read": (read := ReadRows())}
    spec = file_round.spec_of(settings, files.data, files.held_out, **about)
    file_round.require_packages(names.attempted)
    directory = _round_directory(output, spec)
    made = run_async(_run(spec, directory, settings, quiet=as_json))
    if made.adapter is not None:
        _copy(made.adapter, output)
    report = _report(stage, made, output) | _rows(spec, made, read)
    rows = report["rows"]
    if rows["left_out"] > rows["trained"]:
        print_error(f"flywheel: more rows are left out ({rows['left_out']:,}) than trained on ({rows['trained']:,})")
    if as_json:
        print_json(report)
    else:
        _print(escape_terminal(report))
    if made.adapter is None:
        raise typer.Exit(EXIT_FAILED)


def _empty(output: Path) -> Path:
    """The folder of the adapter. A usage error if it has files already."""
    try:
        is_empty = not output.exists() or not any(output.iterdir())
    except OSError as error:
        why = f"{short_path(output)} cannot be used: {error.strerror}"
        raise typer.BadParameter(why, param_hint="--output") from None
    if not is_empty:
        raise typer.BadParameter(f"{short_path(output)} is not empty", param_hint="--output")
    return output


def _round_directory(output: Path, spec: RoundSpec) -> Path:
    """A folder beside that of the adapter for the round's files: that of an earlier run, if it was stopped and did
    the same, else a new one."""
    from flywheel.training.data.round_directory import changes, is_of

    names = itertools.chain([".round"], (f".round-{number}" for number in itertools.count(2)))
    folders = (output.with_name(output.name + name) for name in names)
    about = ""
    for folder in folders:
        if not folder.exists():
            if about:
                print_error(f"flywheel: it starts over: {about}")
            return folder
        if is_of(folder, spec):
            print_error(f"flywheel: it goes on with the round in {short_path(str(folder))}")
            return folder
        if changed := changes(folder, spec):
            about = f"since the unfinished round in {short_path(str(folder))}, these have changed: {changed}"
    raise AssertionError("names have no end")


def _base(named: str | None, adapter: Path | None, attempted: str) -> str | None:
    """The base model that the command line or the adapter names. Raises ConfigError."""
    from flywheel.daemon.file_round import base_model_of

    if named is not None:
        # Not relative to the configuration file, as its own paths are.
        return str(absolute(Path(named))) if absolute(Path(named)).is_dir() else named
    return base_model_of(adapter, attempted) or None if adapter is not None else None


def _settings(options: Mapping[str, Any], config: Path | None, command: str) -> Config:
    """The settings of the file, with those of the command line above them. Raises ConfigError."""
    from flywheel.config.file import parse
    from flywheel.config.interpolation import values_of
    from flywheel.config.section import merged
    from flywheel.system.yaml_file import read_yaml

    file, raw = find_config(config), dict[str, Any]()
    if file is not None:
        file = absolute(file)
        attempted = f"read configuration {file}"
        raw = values_of(read_yaml(file, attempted, "Name a YAML file.", keys_once=True), attempted) or {}
    folder = file.parent if file is not None else Path.cwd()
    name = f"{short_path(file)} with the options of {command}" if file is not None else f"of {command}"
    if isinstance(raw, dict):
        # Nothing is read from a source, and the base model is trained for no target.
        raw = merged({**raw, "sources": [], "targets": {}}, _present(options))
    settings = parse(raw, name, folder, given=given_settings())
    if "base" not in settings.model.model_fields_set:
        raise typer.BadParameter("there is no base model", param_hint="--base-model")
    return settings


def _present(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that were not given."""
    cleared = {"chain"}  # None takes the chain of a file away
    return {
        name: _present(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if value is not None or name in cleared
    }


async def _run(spec: RoundSpec, directory: Path, settings: Config, *, quiet: bool) -> TuneResult:
    """Run the round. A signal stops its worker. Raises StoppedError and TrainError."""
    from flywheel.cli import progress_bars
    from flywheel.daemon.file_round import train_on_files
    from flywheel.system.signals import unless_cancelled

    left = f"The same command goes on with it; its files are in {directory}."
    async with progress_bars.beside(progress_bars.of_round(directory, quiet=quiet)):
        return await unless_cancelled(train_on_files(spec, directory, settings), f"finish {spec.round_id}", left)


def _copy(adapter: Path, output: Path) -> None:
    try:
        shutil.copytree(adapter, output, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TrainError(f"copy the adapter to {output}", why, f"It is in {adapter}.") from None


def _report(stage: str, made: TuneResult, output: Path) -> dict[str, Any]:
    from flywheel.daemon.status import metrics_of

    steps = [line for line in metrics_of(made.directory) if line.get("event") == "step"]

    def first_and_last(name: str) -> list[float]:
        values = [line[name] for line in steps if line.get(name) is not None]
        return [values[0], values[-1]] if values else []

    compared = made.comparison
    return {
        "stage": stage,
        "adapter": str(output) if made.adapter is not None else None,
        "is_better": made.is_better if compared is not None else None,
        "reason": made.reason,
        "steps": made.steps,
        "loss": first_and_last("loss"),
        "held_out_loss": first_and_last("held_out_loss"),
        "rewards": [made.reward_first, made.reward_last] if made.reward_first is not None else [],
        "comparison": compared.model_dump(mode="json", exclude={"scores"}) if compared is not None else None,
        "directory": str(made.directory),
    }


def _rows(spec: RoundSpec, made: TuneResult, read: ReadRows) -> dict[str, Any]:
    """What became of the rows of the data."""
    left_out = read.left_out | made.left_out
    trained, held_out = (sum(each.task_id not in left_out for each in tasks) for tasks in (spec.train, spec.held_out))
    return {
        "rows": {"read": len(read.places), "trained": trained, "held_out": held_out, "left_out": len(left_out)},
        "left_out": read.by_reason(left_out.items()),
        "notes": read.by_reason([*read.notes, *made.partly.items()]),
    }


def _print(report: dict[str, Any]) -> None:
    from flywheel.daemon.rounds.file_tasks import sentence_of

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
