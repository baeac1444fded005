"""`flywheel export`: write tasks as a file for another trainer, or as a table."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal

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
from flywheel.errors import ExportError
from flywheel.records.states import ABSENT, ACCEPTED, Split, TaskState
from flywheel.system.files import PRIVATE, json_line, whole_file
from flywheel.system.terminal import escape_terminal, quantity
from flywheel.training.data.chat_messages import LeftOut
from flywheel.training.data.export_formats import FORMATS, ExportSample, Format, FormatName, Record, reply_of

if TYPE_CHECKING:
    from flywheel.config.file import Config
    from flywheel.store.kernel.database import Store
    from flywheel.store.views.task_list import ExportedTask

PAGE: Final = 200
MOST_ROUNDS: Final = 1000
"""The newest rounds in which measured losses are looked for."""


States = Literal["accepted", "pending", "rejected", "all"]
Splits = Literal["train", "held-out", "all"]
STATES: Final[dict[States, tuple[TaskState, ...]]] = {
    "accepted": ACCEPTED,
    "pending": (TaskState.PENDING, TaskState.JUDGING),
    "rejected": (TaskState.REJECTED,),
    # The others are no training data.
    "all": tuple(state for state in TaskState if state not in (TaskState.HELD, TaskState.DEAD, *ABSENT)),
}
REPLIES: Final = tuple(state for state in TaskState if state not in ABSENT)
"""What a table has by default. What was withdrawn is a reply no more."""


@dataclass
class Survey:
    """The result of the first pass: the tasks of each record to write, and the traits of the records."""

    groups: list[tuple[int, ...]] = field(default_factory=list)
    typed: frozenset[str] = frozenset()
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, group: tuple[int, ...], columns: frozenset[str]) -> None:
        # The first record with a new trait goes to the front: readers infer types from the beginning of a file.
        if new := columns - self.typed:
            self.typed |= new
            self.groups.insert(0, group)
        else:
            self.groups.append(group)


@app.command()
def export(
    name: Annotated[
        FormatName,
        typer.Option(
            "--format", help="The trainer that the file is for; `csv` and `parquet` are tables for analysis."
        ),
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
        typer.Option(help="State of the tasks. Default: accepted, used in a round or not; of a table, all."),
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
    survey = run_async(_export(settings, chosen, out, chosen_state, split, margin or 0.0, target))
    if metrics is not None:
        run_async(_measure(settings, metrics, sorted({number for group in survey.groups for number in group})))
    report = {
        "format": name.value,
        "out": out,
        "lines": len(survey.groups),
        "left_out": dict(survey.left_out.most_common()),
        "state": "accepted and rejected" if chosen.paired else chosen_state,
        "split": split,
    }
    if as_json:
        print_json(report)
        return
    say = print_error if out == "-" else print
    of = f"{report['format']}, {report['state']}, {report['split']}"
    say(escape_terminal(f"{quantity(len(survey.groups), 'line')} in {'stdout' if out == '-' else out} ({of})"))
    for reason, number in survey.left_out.most_common():
        say(escape_terminal(f"left out {number:,}: {reason}"))


async def _export(
    config: Config, form: Format, out: str, chosen: States, split: Splits, margin: float, target: str | None
) -> Survey:
    from flywheel.store.views import task_list

    if target is not None and target not in config.targets:
        names = ", ".join(config.targets)
        hint = f"The targets are {names}." if names else "The configuration has no `targets`."
        raise ExportError(f"export for {form.name}", f"there is no target {target}", hint)

    splits = tuple(Split) if split == "all" else (Split(split),)
    async with open_state(config, "view") as store:
        if form.paired:
            survey = await _pairs(store, form, splits, margin, target)
        else:
            survey = Survey()
            states = REPLIES if form.is_table and chosen == "all" else STATES[chosen]
            tasks = _tasks if form.is_table else partial(_decided, left_out=survey.left_out)
            async for one in tasks(store, states, splits, target):
                with _counted(survey.left_out):
                    record = form.record(_sample(one, form))
                    survey.add((one.id,), form.columns(record))
            if form.is_table:
                survey.groups.sort()
        if not survey.groups:
            what = "accepted and rejected" if form.paired else chosen
            attempted, of_split = f"export for {form.name}", "" if split == "all" else f" in the {split} split"
            of_split += f" of {target}" if target is not None else ""
            if survey.left_out:
                reasons = "; ".join(f"{number}: {reason}" for reason, number in survey.left_out.most_common())
                why = f"every {what} task{of_split} is left out ({reasons})"
                raise ExportError(attempted, why, "Choose another format.")
            counts = sorted((await store.read(task_list.count_by_state)).items())
            if not counts:
                why = f"the state in {config.state_dir} has no task"
                raise ExportError(attempted, why, "Run `flywheel ingest`, or name its file with -c.")
            there = ", ".join(f"{number} {state} ({side})" for (state, side), number in counts)
            hint = f"There are: {there}. Choose with --state and --split."
            raise ExportError(attempted, f"no task is {what}{of_split}", hint)
        with _target(out) as file, form.writer(file, survey.typed) as write:
            async for _, record in _records(store, form, survey.groups):
                write(record)
        return survey


async def _measure(config: Config, path: Path, ids: Sequence[int]) -> None:
    """Write a line of metrics for each of these tasks."""
    from flywheel.store import rounds
    from flywheel.store.views import task_list
    from flywheel.training.data.loss_selection import losses_in, metrics_of

    async with open_state(config, "view") as store:
        losses = losses_in([Path(row.dir) for row in await store.read(rounds.newest, MOST_ROUNDS)])
        with _target(str(path)) as file:
            for start in range(0, len(ids), PAGE):
                for one in await store.read(task_list.with_verdicts, ids[start : start + PAGE]):
                    file.write(json_line(metrics_of(one.line, losses.get(one.line["task_id"]))))


async def _pairs(store: Store, form: Format, splits: Collection[Split], margin: float, target: str | None) -> Survey:
    from flywheel.training.data.pairs import ALONE, Reply, matched

    survey = Survey()
    # Hashes and scores and not texts, so that a large state needs little memory.
    rejected = defaultdict[bytes, list[Reply[int]]](list)
    accepted = defaultdict[bytes, list[Reply[int]]](list)
    for states, side in ((STATES["rejected"], rejected), (STATES["accepted"], accepted)):
        # What is not on this side is on the other one.
        async for one in _decided(store, states, splits, target, Counter()):
            with _counted(survey.left_out):
                prompt, reply = reply_of(one.id, _sample(one, form))
                if side is accepted and prompt not in rejected:
                    raise LeftOut(ALONE)
                side[prompt].append(reply)
    found = []
    for prompt, worse in rejected.items():
        pairs, left_out = matched(accepted[prompt], worse, margin)
        found += [(chosen.of, other.of) for chosen, other in pairs]
        survey.left_out += left_out
    async for group, record in _records(store, form, sorted(found)):
        survey.add(group, form.columns(record))
    return survey


async def _tasks(
    store: Store,
    states: Collection[TaskState],
    splits: Collection[Split],
    target: str | None,
    if_labelled: Collection[TaskState] = (),
) -> AsyncIterator[ExportedTask]:
    from flywheel.store.views import task_list

    after, which = 0, partial(task_list.next_ids, if_labelled=if_labelled, limit=PAGE)
    while ids := await store.read(which, states, splits, target, after=after):
        for one in await store.read(task_list.with_verdicts, ids):
            yield one
        after = ids[-1]


async def _decided(
    store: Store, states: Sequence[TaskState], splits: Collection[Split], target: str | None, left_out: Counter[str]
) -> AsyncIterator[ExportedTask]:
    """The tasks in these states. Where they are only accepted or only rejected ones, what most people say of a reply
    counts more than its verdict, as in rounds that train on recorded replies."""
    others = {STATES["accepted"]: STATES["rejected"], STATES["rejected"]: STATES["accepted"]}.get(tuple(states), ())
    async for one in _tasks(store, states, splits, target, others):
        if not others or _as_people_say(one).state in states:
            yield one
        elif one.state in states:
            left_out[f"most people {'accept' if one.by_people else 'reject'} the reply"] += 1


def _as_people_say(one: ExportedTask) -> ExportedTask:
    if one.by_people in (None, one.state in ACCEPTED) or one.state not in (*ACCEPTED, TaskState.REJECTED):
        return one
    state = TaskState.ACCEPTED if one.by_people else TaskState.REJECTED
    return replace(one, state=state, score=float(one.by_people))


async def _records(
    store: Store, form: Format, groups: Sequence[tuple[int, ...]]
) -> AsyncIterator[tuple[tuple[int, ...], Record]]:
    from flywheel.store.views import task_list

    for start in range(0, len(groups), PAGE):
        some = groups[start : start + PAGE]
        tasks = {one.id: one for one in await store.read(task_list.with_verdicts, list(itertools.chain(*some)))}
        for group in some:
            yield group, form.record(*(_sample(tasks[number], form) for number in group))


def _sample(one: ExportedTask, form: Format) -> ExportSample:
    one = one if form.is_table else _as_people_say(one)
    return ExportSample(one.line, one.state, one.score, one.results, one.rubric)


@contextlib.contextmanager
def _counted(left_out: Counter[str]) -> Iterator[None]:
    try:
        yield
    except LeftOut as reason:
        left_out[str(reason)] += 1


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
            with whole_file(path, mode=PRIVATE) as file:
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
