"""`flywheel export`: write tasks as a file for another trainer."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from flywheel.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    binary_stdout,
    load_config,
    print_error,
    print_json,
    run_async,
)
from flywheel.errors import ExportError
from flywheel.files import whole_file
from flywheel.formats import FORMATS, Format, FormatName, LeftOut, Sample, typed_columns
from flywheel.formats.writer import JsonLinesWriter, Record
from flywheel.states import Split, TaskState
from flywheel.terminal import escape_terminal, quantity

if TYPE_CHECKING:
    from flywheel.store.database import Store
    from flywheel.store.export_selection import Selected

PAGE: Final = 200


class StateArg(StrEnum):
    """The values of `--state`."""

    ACCEPTED = "accepted"
    PENDING = "pending"
    REJECTED = "rejected"
    ALL = "all"


class SplitArg(StrEnum):
    """The values of `--split`."""

    TRAIN = "train"
    HELD_OUT = "held-out"
    ALL = "all"


STATES: Final = {
    StateArg.ACCEPTED: (TaskState.ACCEPTED, TaskState.RESERVED, TaskState.CONSUMED),
    StateArg.PENDING: (TaskState.PENDING, TaskState.JUDGING),
    StateArg.REJECTED: (TaskState.REJECTED,),
    # Dead and withdrawn tasks are no training data.
    StateArg.ALL: (
        TaskState.PENDING,
        TaskState.JUDGING,
        TaskState.UNDECIDED,
        TaskState.ACCEPTED,
        TaskState.RESERVED,
        TaskState.CONSUMED,
        TaskState.REJECTED,
    ),
}
SPLITS: Final = {
    SplitArg.TRAIN: (Split.TRAIN,),
    SplitArg.HELD_OUT: (Split.HELD_OUT,),
    SplitArg.ALL: tuple(Split),
}


@dataclass
class Survey:
    """The result of the first pass: the tasks of each record to write, and the traits of the records."""

    groups: list[tuple[int, ...]] = field(default_factory=list)
    typed: frozenset[str] = frozenset()
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, group: tuple[int, ...], record: Record) -> None:
        # The first record with a new trait goes to the front: readers infer types from the beginning of a file.
        if new := typed_columns(record) - self.typed:
            self.typed |= new
            self.groups.insert(0, group)
        else:
            self.groups.append(group)


@app.command()
def export(
    name: Annotated[FormatName, typer.Option("--format", help="The trainer that reads the file.")],
    config: ConfigOption = None,
    out: Annotated[
        str,
        typer.Option(metavar="PATH", help="The file; `-` is stdout. Default: FORMAT.jsonl or FORMAT.parquet, here."),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    state: Annotated[
        StateArg | None,
        typer.Option(help="Which tasks. Default: accepted (those that a round took are among them)."),
    ] = None,
    split: Annotated[SplitArg, typer.Option(help="Which split.")] = SplitArg.TRAIN,
    margin: Annotated[
        float | None,
        typer.Option(min=0, max=1, metavar="M", help="trl-dpo: how far a pair's scores are apart at least."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write tasks as a file for another trainer."""
    chosen = FORMATS[name]
    if chosen.paired and state is not None:
        raise typer.BadParameter(f"{name} pairs accepted with rejected replies", param_hint="--state")
    if margin is not None and not chosen.paired:
        raise typer.BadParameter(f"{name} has no pairs", param_hint="--margin")
    if out == "-" and as_json:
        raise typer.BadParameter("stdout cannot hold the records and the report; name a file", param_hint="--out")
    out = out or f"{name}.{chosen.suffix}"
    if out != "-":
        _check(Path(out), force)
    elif chosen.suffix != "jsonl" and sys.stdout is not None and sys.stdout.isatty():
        raise typer.BadParameter(f"{chosen.suffix} is not for a terminal; name a file", param_hint="--out")
    wanted = state or StateArg.ACCEPTED
    survey = run_async(_export(load_config(config).state_dir, chosen, out, wanted, split, margin or 0.0))
    report = {
        "format": name.value,
        "out": out,
        "lines": len(survey.groups),
        "left_out": dict(survey.left_out.most_common()),
        "state": "accepted and rejected" if chosen.paired else wanted.value,
        "split": split.value,
    }
    if as_json:
        print_json(report)
    else:
        _print(escape_terminal(report), print_error if out == "-" else print)


def _print(report: dict[str, Any], say: Callable[[str], None]) -> None:
    target = "stdout" if report["out"] == "-" else report["out"]
    say(f"{quantity(report['lines'], 'line')} in {target} ({report['format']}, {report['state']}, {report['split']})")
    for reason, number in report["left_out"].items():
        say(f"left out {number:,}: {reason}")


async def _export(
    state_dir: Path, form: Format, out: str, wanted: StateArg, split: SplitArg, margin: float
) -> Survey:
    from flywheel.store import export_selection
    from flywheel.store.database import Store

    store = await Store.view(state_dir)
    try:
        if form.paired:
            survey = await _pairs(store, form, SPLITS[split], margin)
        else:
            survey = await _singles(store, form, STATES[wanted], SPLITS[split])
        if not survey.groups:
            what = "accepted and rejected" if form.paired else wanted.value
            raise _nothing(form, what, split, survey, await store.read(export_selection.counts), state_dir)
        with _target(out) as file:
            writer = form.writer(file, survey.typed)
            await _write(store, form, survey.groups, writer)
            writer.close()
        return survey
    finally:
        await store.close()


async def _singles(store: Store, form: Format, states: Collection[TaskState], splits: Collection[Split]) -> Survey:
    survey = Survey()
    async for one in _tasks(store, states, splits):
        with _counted(survey.left_out):
            survey.add((one.id,), form.record(_sample(one)))
    return survey


async def _pairs(store: Store, form: Format, splits: Collection[Split], margin: float) -> Survey:
    from flywheel.formats.preference_pairs import Pairing, candidate

    pairing = Pairing(margin)
    for wanted, add in ((StateArg.REJECTED, pairing.add_rejected), (StateArg.ACCEPTED, pairing.add_accepted)):
        async for one in _tasks(store, STATES[wanted], splits):
            with _counted(pairing.left_out):
                add(candidate(one.id, _sample(one)))
    survey = Survey()
    async for group, record in _records(store, form, pairing.pairs()):
        survey.add(group, record)
    survey.left_out = pairing.left_out
    return survey


async def _tasks(store: Store, states: Collection[TaskState], splits: Collection[Split]) -> AsyncIterator[Selected]:
    from flywheel.store import export_selection

    after = 0
    while ids := await store.read(export_selection.page, states, splits, after=after, limit=PAGE):
        for one in await store.read(export_selection.read, ids):
            yield one
        after = ids[-1]


async def _records(
    store: Store, form: Format, groups: Sequence[tuple[int, ...]]
) -> AsyncIterator[tuple[tuple[int, ...], Record]]:
    from flywheel.store import export_selection

    for start in range(0, len(groups), PAGE):
        some = groups[start : start + PAGE]
        found = {one.id: one for one in await store.read(export_selection.read, list(itertools.chain(*some)))}
        for group in some:
            yield group, form.record(*(_sample(found[number]) for number in group))


async def _write(store: Store, form: Format, groups: Sequence[tuple[int, ...]], writer: JsonLinesWriter) -> None:
    async for _, record in _records(store, form, groups):
        writer.write(record)


def _sample(one: Selected) -> Sample:
    return Sample(one.line, one.state, one.score)


@contextlib.contextmanager
def _counted(left_out: Counter[str]) -> Iterator[None]:
    try:
        yield
    except LeftOut as reason:
        left_out[str(reason)] += 1


def _check(path: Path, force: bool) -> None:
    if path.is_dir():
        raise ExportError(f"write {path}", "it is a directory", "Name a file with --out.")
    if path.is_file() and not force:
        raise ExportError(f"write {path}", "it exists", "Name another file with --out, or replace it with --force.")


@contextlib.contextmanager
def _target(out: str) -> Iterator[BinaryIO]:
    """The file, written atomically; or stdout, a device or a pipe, which cannot be replaced."""
    path = Path(out)
    try:
        if out == "-":
            stdout = binary_stdout()
            yield stdout
            stdout.flush()
        elif path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
        else:
            with whole_file(path) as file:
                yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        if out == "-":
            # At exit the rest of the buffer would be written again, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ExportError(
            f"write {'stdout' if out == '-' else path}",
            error.strerror or str(error),
            "Choose with --out a file whose directory exists, has room and may be written by you.",
        ) from error


def _nothing(
    form: Format,
    wanted: str,
    split: SplitArg,
    survey: Survey,
    there: dict[tuple[TaskState, Split], int],
    state_dir: Path,
) -> ExportError:
    attempted = f"export for {form.name}"
    side = "" if split is SplitArg.ALL else f" in the {split} split"
    if survey.left_out:
        reasons = "; ".join(f"{number}: {reason}" for reason, number in survey.left_out.most_common())
        return ExportError(attempted, f"every {wanted} task{side} is left out ({reasons})", "Choose another format.")
    if not there:
        return ExportError(
            attempted, f"the state in {state_dir} has no task", "Run `flywheel ingest`, or name its file with -c."
        )
    listed = ", ".join(f"{number} {state} ({side})" for (state, side), number in sorted(there.items()))
    return ExportError(
        attempted, f"no task is {wanted}{side}", f"There are: {listed}. Choose with --state and --split."
    )
