"""What rounds could train on of the tasks that are there, before a judge is paid for deciding about them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from msgspec import Struct, to_builtins
from sqlalchemy import Connection

from flywheel.config.file import Config
from flywheel.config.ingest import JsonlSource, StudioSource
from flywheel.daemon.configured_source import changes_of_model_rules
from flywheel.records.exclusion import WORDS, Exclusion
from flywheel.records.states import Split, TaskState
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store
from flywheel.store.views.left_out import count_kinds, still_used
from flywheel.system.terminal import quantity

UNJUDGED: Final = (TaskState.PENDING, TaskState.JUDGING, TaskState.UNDECIDED)


class ForecastReason(Struct, frozen=True):
    """Training tasks that a setting leaves out (empty: no setting includes them), with the reason in a few words."""

    reason: str
    exclusions: list[Exclusion]
    setting: str
    tasks: int


class Forecast(Struct, frozen=True):
    """Tasks that rounds may still use: those that are not decided, or were accepted and not trained on, and rejected
    ones where gate or rounds ask them. Each is `held_out` or `for_training`; of the latter, `usable` are left out for
    no reason, and `left_out` for at least one. Each of `reasons` counts all training tasks that it applies to."""

    tasks: int
    held_out: int
    for_training: int
    usable: int
    left_out: int
    reasons: list[ForecastReason]

    def as_json(self) -> dict[str, Any]:
        made: dict[str, Any] = to_builtins(self)
        return made


def forecast(conn: Connection, config: Config) -> Forecast:
    """What rounds with these settings could train on, if the judge accepted everything. Changed settings count, also
    before a process that writes the state has applied them."""
    kinds = count_kinds(conn)
    for change in changes_of_model_rules(conn, config):
        kinds[change.before] -= 1
        kinds[change.after] += 1
    splits: Counter[Split] = Counter()
    by_reason: Counter[tuple[str, str]] = Counter()
    left_out = 0
    for split, reasons, number in still_used(kinds, config.takes):
        splits[split] += number
        if split is Split.TRAIN and reasons:
            left_out += number
            by_reason.update(dict.fromkeys({_reason(config, each) for each in reasons}, number))
    named: dict[tuple[str, str], list[Exclusion]] = {}
    for each in Exclusion:
        named.setdefault(_reason(config, each), []).append(each)
    return Forecast(
        tasks=splits.total(),
        held_out=splits[Split.HELD_OUT],
        for_training=splits[Split.TRAIN],
        usable=splits[Split.TRAIN] - left_out,
        left_out=left_out,
        reasons=sorted(
            (
                ForecastReason(few, exclusions, setting, by_reason[few, setting])
                for (few, setting), exclusions in named.items()
                if by_reason[few, setting]
            ),
            key=lambda each: (-each.tasks, each.reason),
        ),
    )


async def forecast_of_sources(config: Config) -> tuple[Forecast | None, list[str]]:
    """What rounds with these settings could train on of the databases and files that they name, and, in clauses, what
    could not be read of these; None if nothing could.

    They are read into a state that ends with the process, so that no verdict and no erasure of the configured one
    counts. Recorded calls are not pulled: a prompt that only these have is not exact. Copies of data sets and what
    the own receiver stored are not read.
    """
    stored = [each for each in config.sources if isinstance(each, StudioSource | JsonlSource)]
    named = [each for each in stored if isinstance(each, StudioSource) or each.dataset is None]
    if not named:
        return None, ["the settings name no database"]
    there = [each for each in named if each.path.exists()]
    wrong = [f"there is no {each.path}" for each in named if each not in there]
    read = {"sources": there, "serving": config.serving.model_copy(update={"call_log": None})}
    store = await Store.empty()
    ingestion = Ingestion(store, config.model_copy(update=read), export_tasks=False)
    try:
        reports = await ingestion.run(final=True)
        wrong += [str(report.error) for report in reports if report.error is not None]
        is_read = any(report.error is None for report in reports)
        return (await store.read(forecast, config) if is_read else None), wrong
    finally:
        await ingestion.close()
        await store.close()


def none_free(conn: Connection, config: Config) -> tuple[str, str]:
    """Why no sample is free, by what leaves tasks out and how many, and what to do. It says to wait if tasks that are
    still to be judged could be taken."""
    takes, waiting, rejected = config.takes.train, 0, 0
    for kind, number in count_kinds(conn).items():
        if kind.split == Split.TRAIN and takes.target in (None, kind.target):
            is_usable = not config.takes.leaving_out(kind.excluded, Split.TRAIN, is_rejected=False)
            waiting += number if kind.state in UNJUDGED and is_usable else 0
            rejected += number if kind.state == TaskState.REJECTED and not takes.rejected_uses else 0
    found = forecast(conn, config)
    counts = [(each.reason, each.setting, each.tasks) for each in found.reasons]
    counts += [("rejected", "filter", rejected), ("held out", "ingest.train_ratio", found.held_out)]
    left_out = [
        f"{reason}{f' (`{setting}`)' if setting else ''}: {number:,}" for reason, setting, number in counts if number
    ]
    why = "; ".join(("no sample is free", *left_out))
    if waiting:
        return why, f"Wait: {quantity(waiting, 'task')} that rounds could take must still be judged."
    return (
        why,
        "No unjudged task could be used by a round: change the settings that exclude tasks, or collect more traces.",
    )


def _reason(config: Config, each: Exclusion) -> tuple[str, str]:
    """An exclusion in a few words, and its setting. Several may have the same."""
    words = WORDS[each]
    is_of_agent = each is Exclusion.UNCALLED and config.rollout.agent == "reply"
    return words.few, WORDS[Exclusion.TOOLS].setting if is_of_agent else words.setting
