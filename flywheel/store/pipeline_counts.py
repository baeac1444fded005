"""The counts that people look at: from replies to adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from flywheel.exclusion import TrainedModels
from flywheel.states import LetterState, ReplyState, TaskState
from flywheel.store.judging import CHAIN, PERSON
from flywheel.store.ledger import SourceCounts
from flywheel.store.schema import dead_letters, meta, replies, sources, tasks, verdicts
from flywheel.verdict import Outcome

JUDGE_NOTE = "judge"
"""Key of the note that tells `status` why judging does not go on."""
ROUND_NOTE = "round"
"""Key of the note that tells `status` why no round starts, or what the live one waits for."""

_ACCEPTED = [TaskState.ACCEPTED.value, TaskState.RESERVED.value, TaskState.CONSUMED.value]


def by_adapter(conn: Connection, models: TrainedModels) -> list[dict[str, Any]]:
    """What became of the tasks that each adapter answered; "" is the base model. `acceptance` leaves out the rest.

    What was asked of other `models` than the alias, its versions and its base is none of theirs.
    """
    counts: dict[str, dict[str, int]] = {}
    rows = conn.execute(
        select(tasks.c.adapter, tasks.c.model, tasks.c.state, func.count())
        .group_by(tasks.c.adapter, tasks.c.model, tasks.c.state)
        .order_by(func.min(tasks.c.id))
    )
    for adapter, model, state, number in rows:
        if not models.is_own(model, adapter):
            continue
        entry = counts.setdefault(adapter, {"accepted": 0, "rejected": 0, "undecided": 0, "other": 0})
        kind = "accepted" if state in _ACCEPTED else state if state in ("rejected", "undecided") else "other"
        entry[kind] += number
    return [
        {"adapter": adapter, **entry, "acceptance": _share(entry["accepted"], entry["accepted"] + entry["rejected"])}
        for adapter, entry in sorted(counts.items())
    ]


def other_models(conn: Connection, models: TrainedModels) -> dict[str, int]:
    """How many tasks other models answered, by their names, the most first."""
    rows = conn.execute(select(tasks.c.model, tasks.c.adapter, func.count()).group_by(tasks.c.model, tasks.c.adapter))
    found: Counter[str] = Counter()
    for model, adapter, number in rows:
        if not models.is_own(model, adapter):
            found[model] += number
    return dict(found.most_common())


def recent_verdicts(conn: Connection, newest: int) -> dict[str, Any]:
    """What came of the newest decided verdicts: how many, how many accepted, and of the rejected ones by what.

    A verdict counts once for each criterion that it did not meet; without one, for its score, its filter or the
    person that gave it.
    """
    decided = verdicts.c.outcome.in_([Outcome.ACCEPTED.value, Outcome.REJECTED.value])
    query = select(verdicts.c.outcome, verdicts.c.results, verdicts.c.rubric_hash)
    rows = conn.execute(query.where(decided).order_by(verdicts.c.id.desc()).limit(newest)).all()
    rejected = [row for row in rows if row.outcome == Outcome.REJECTED.value]
    causes = Counter(cause for row in rejected for cause in _causes(row.results, row.rubric_hash))
    return {"judged": len(rows), "accepted": len(rows) - len(rejected), "rejected_by": dict(causes.most_common())}


def none_accepted(conn: Connection, window: int) -> str:
    """A warning when none of the newest `window` verdicts accepted a reply; else empty."""
    recent = recent_verdicts(conn, window)
    if recent["judged"] < window or recent["accepted"]:
        return ""
    causes = ", ".join(f"{name} {number}" for name, number in recent["rejected_by"].items())
    return (
        f"none of the last {window} judged replies was accepted (not met: {causes}). Read some with"
        " `flywheel tasks --state rejected` and `flywheel show ID`: the rubric, the judge or the agent may be wrong."
    )


def _causes(results: Sequence[Mapping[str, Any]], rubric_hash: str) -> list[str]:
    failed = [str(result["criterion"]) for result in results if not result["passed"]]
    if failed:
        return failed
    if rubric_hash == PERSON:
        return ["a person"]
    return ["a filter"] if rubric_hash.startswith(CHAIN) else ["the total score"]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def count_dead_letters(conn: Connection) -> int:
    """Those that nobody has retried or dropped yet."""
    is_open = dead_letters.c.state == LetterState.OPEN.value
    return int(conn.execute(select(func.count()).select_from(dead_letters).where(is_open)).scalar_one())


def all_sources(conn: Connection) -> list[dict[str, Any]]:
    return [dict(row) for row in conn.execute(select(sources).order_by(sources.c.id)).mappings()]


def counts_by_source(conn: Connection) -> dict[int, SourceCounts]:
    """What the ledger holds of every source that has replies."""
    ends: dict[int, Counter[str]] = {}
    skips: dict[int, Counter[str]] = {}
    rows = conn.execute(
        select(replies.c.source_id, replies.c.state, replies.c.skip_reason, func.count()).group_by(
            replies.c.source_id, replies.c.state, replies.c.skip_reason
        )
    )
    for source, state, reason, number in rows:
        ends.setdefault(source, Counter())[state] += number
        if state == ReplyState.SKIPPED:
            skips.setdefault(source, Counter())[str(reason)] += number
    return {
        source: SourceCounts(
            found.total(),
            found[ReplyState.CONVERTED],
            dict(sorted(skips.get(source, Counter()).items())),
            found[ReplyState.DEAD],
        )
        for source, found in ends.items()
    }


def note(conn: Connection, key: str, value: str) -> None:
    """Remember a word for `status`; an empty one forgets it."""
    conn.execute(meta.delete().where(meta.c.key == key))
    if value:
        conn.execute(meta.insert().values(key=key, value=value))


def noted(conn: Connection, key: str) -> str:
    value = conn.execute(select(meta.c.value).where(meta.c.key == key)).scalar_one_or_none()
    return str(value) if value is not None else ""
