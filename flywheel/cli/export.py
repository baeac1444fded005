"""`flywheel export`: write tasks as a file for another trainer, or as a table."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    binary_stdout,
    load_config,
    open_state,
    print_error,
    print_json,
    require_outside_state,
    run_async,
    user_path,
)
from flywheel.config.file import Config
from flywheel.errors import ExportError
from flywheel.system.files import PRIVATE, whole_file
from flywheel.system.terminal import escape_terminal, quantity
from flywheel.training.data.export import Export
from flywheel.training.data.export_formats import FORMATS, Format, FormatName, Splits, States


@app.command()
def export(
    name: Annotated[
        FormatName,
        typer.Option("--format", help="Trainer that reads the file; `csv` and `parquet` are tables for analysis."),
    ],
    config: ConfigOption = None,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="The file; `-` is stdout. Default: FORMAT.jsonl, verl.parquet, or replies.csv or .parquet.",
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    state: Annotated[
        States | None,
        typer.Option(help="State of the tasks. Default: accepted (tables: all), whether used in a round or not."),
    ] = None,
    split: Annotated[Splits | None, typer.Option(help="Split of the tasks. Default: train; of a table, all.")] = None,
    margin: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="M", help="trl-dpo: minimum difference between the scores of a pair."),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="NAME", help="Only tasks of this target.")] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write tokens, lexical diversity and loss of each reply here."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write tasks as a file for another trainer, or replies as a table (`csv`, `parquet`)."""
    chosen = FORMATS[name]
    if chosen.paired and state is not None:
        raise typer.BadParameter(f"{name} pairs accepted with rejected replies", param_hint="--state")
    if margin is not None and not chosen.paired:
        raise typer.BadParameter(f"{name} has no pairs", param_hint="--margin")
    if out == "-" and as_json:
        raise typer.BadParameter("stdout cannot hold the records and the report; name a file", param_hint="--out")
    out = str(user_path(Path(out or f"{'replies' if chosen.is_table else name}.{chosen.suffix}")))
    split = split or ("all" if chosen.is_table else "train")
    files = {"--out": Path(out)} | ({"--metrics": metrics} if metrics is not None else {})
    if len({os.path.realpath(path) for path in files.values()}) < len(files):
        raise typer.BadParameter("it is the file of --out; name another", param_hint="--metrics")
    for option, path in files.items():
        if str(path) == "-":
            continue
        if path.is_dir():
            raise ExportError(f"write {path}", "it is a directory", f"Name a file with {option}.")
        if path.is_file() and not force:
            hint = f"Name another file with {option}, or replace it with --force."
            raise ExportError(f"write {path}", "it exists", hint)
    if out == "-" and chosen.suffix == "parquet" and sys.stdout is not None and sys.stdout.isatty():
        raise typer.BadParameter(f"{chosen.suffix} is not for a terminal; name a file", param_hint="--out")
    chosen_state = state or ("all" if chosen.is_table else "accepted")
    settings = load_config(config)
    require_outside_state(settings, *(path for path in files.values() if str(path) != "-"))
    if target is not None and target not in settings.targets:
        names = ", ".join(settings.targets)
        hint = f"The targets are {names}." if names else "The configuration has no `targets`."
        raise ExportError(f"export for {name}", f"there is no target {target}", hint)
    made = run_async(_export(settings, files, chosen, chosen_state, split, margin or 0.0, target))
    report = {"format": name.value, "out": out, **made.as_json()}
    if as_json:
        print_json(report)
        return
    say = print_error if out == "-" else print
    of = f"{report['format']}, {report['state']}, {report['split']}"
    say(escape_terminal(f"{quantity(report['lines'], 'line')} in {'stdout' if out == '-' else out} ({of})"))
    for reason, number in report["left_out"].items():
        say(escape_terminal(f"left out {number:,}: {reason}"))


async def _export(
    config: Config,
    files: Mapping[str, Path],
    form: Format,
    state: States,
    split: Splits,
    margin: float,
    target: str | None,
) -> Export:
    async with open_state(config, "view") as store:
        made = Export(store, config.state_dir, form, state, split, margin, target)
        await made.survey()
        with _target(files["--out"]) as file:
            await made.write(file)
        if "--metrics" in files:
            with _target(files["--metrics"]) as file:
                await made.write_metrics(file)
        return made


@contextlib.contextmanager
def _target(path: Path) -> Iterator[BinaryIO]:
    """The file, written atomically; or stdout, a device or a pipe, which cannot be replaced."""
    try:
        if str(path) == "-":
            stdout = binary_stdout()
            yield stdout
            stdout.flush()
        elif path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
        else:
            with whole_file(path, mode=PRIVATE) as file:
                yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        if str(path) == "-":
            # At exit the rest of the buffer would be written again, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ExportError(
            f"write {'stdout' if str(path) == '-' else path}",
            error.strerror or str(error),
            "Choose with --out a file whose directory exists, has room and may be written by you.",
        ) from error
