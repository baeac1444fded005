"""`flywheel status`: a snapshot of the whole state, read from the database alone, with or without a daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson
from sqlalchemy import Connection, Row

from flywheel import __version__
from flywheel.config import Config
from flywheel.daemon.configured_source import source_of
from flywheel.daemon.rounds.free_samples import AvailableSamples, AvailableSamplesCache, new_samples_needed
from flywheel.daemon.rounds.gate_planning import next_test
from flywheel.errors import ConfigError
from flywheel.judge.usage import Purpose
from flywheel.records.exclusion import WORDS, Exclusion
from flywheel.records.round import METRICS_FILE
from flywheel.records.states import ReplyState, RoundState, TaskState
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.sources.call_puller import OFF, PulledServer, pulled_servers
from flywheel.store import (
    claims,
    dead_letters,
    deployments,
    gate_tests,
    judge_usage,
    ledger,
    rounds,
    samples,
    splits,
    task_file,
    verdicts,
)
from flywheel.store.kernel import database
from flywheel.store.ledger import SourceCounts
from flywheel.store.views import acceptance
from flywheel.store.views.balance import balance
from flywheel.system.lock import holder
from flywheel.training.data.round_progress import progress_of

NOT_INSPECTED: Final = {"condition": "", "serves": "", "error": "", "since": None, "looked_at": None}
"""What is shown of a configured server before its first inspection."""
ROUNDS_SHOWN = 20
MODELS_SHOWN = 5
VERDICTS_SHOWN = 500
"""The newest verdicts, which `status` summarises by rejecting criterion."""


def snapshot(conn: Connection, config: Config) -> dict[str, Any]:
    """All counts, sources, rounds and the deployment, as one JSON object."""
    books = balance(conn)
    shown = rounds.newest(conn, ROUNDS_SHOWN)
    live = rounds.live(conn)
    by_adapter, others = acceptance.by_adapter(conn, config.models_of(None))
    of_targets = {name: _of_target(conn, own) for name, own in config.by_target().items()}
    warnings = [warning for _, found in of_targets.values() for warning in found]
    own = {name: each for name, (each, _) in of_targets.items()}
    return {
        "version": __version__,
        "state_dir": str(config.state_dir),
        "daemon": {"pid": holder(config.state_dir)},
        "sources": _sources(conn, config),
        "replies": {state.value: books.reply_states.get(state, 0) for state in ReplyState},
        "skipped": books.skipped,
        "tasks": {state.value: books.task_states.get(state, 0) for state in TaskState},
        "balance": books.ends,
        "balanced": books.balanced,
        "prompts": samples.count_prompts(conn)._asdict(),
        "left_out": _left_out(samples.count_left_out(conn, config.takes), others),
        "due": claims.count_due(conn),
        "judge": _judge(conn, config),
        "recent_verdicts": verdicts.recent(conn, VERDICTS_SHOWN),
        "warnings": [*dict.fromkeys(warnings), *_warnings(conn, config)],
        "waiting_for": database.noted(conn, database.ROUND_NOTE),
        "rounds": [_round(row) for row in shown],
        "rounds_by_state": {state.value: rounds.count(conn, state) for state in RoundState},
        "promoted": rounds.count(conn, RoundState.PROMOTED),
        "live_round": _live(live) if live is not None else None,
        "gate_decisions": gate_tests.decisions(conn),
        "by_adapter": by_adapter,
        "other_models": others,
        "dead_letters": dead_letters.count(conn)["open"],
        **({"targets": own} if config.targets else own[""]),
    }


def _of_target(conn: Connection, config: Config) -> tuple[dict[str, Any], list[str]]:
    """Samples, gate, deployment and servers of the target whose settings these are, and warnings."""
    alias, scope = config.model.alias, config.takes
    available, warnings = _available(conn, config)
    if available.notice:
        warnings.append(f"{config.target}: {available.notice}" if config.target else available.notice)
    waits = new_samples_needed(conn, config, config.trigger.min_samples)
    active = deployments.active(conn, alias)
    seen = deployments.replica_states(conn, alias)
    found = {
        "free_samples": available.usable,
        "waiting_samples": dict(available.waiting),
        "new_samples": {
            "free": waits.new,
            "needed": waits.needed,
            "rounds_without_promotion": waits.rounds,
            "wait": waits.wait,
        },
        "min_samples": config.trigger.min_samples,
        "held_out": samples.count_held_out(conn, scope.gate),
        "gate": next_test(conn, config).as_json(config.gate),
        "swaps": deployments.outcomes(conn, alias),
        "deployment": {
            "alias": alias,
            "adapter": active.adapter if active else None,
            "since": active.activated_at if active else None,
            "previous": active.previous if active else None,
            "reason": active.reason if active else "",
        },
        "replicas": [
            {"url": url, **NOT_INSPECTED, **seen.get(url, {}), "calls": calls}
            for url, calls in _calls(config).items()
        ],
    }
    return found, warnings


def _calls(config: Config) -> dict[str, dict[str, Any]]:
    """What was pulled from the call log of each configured server; `condition` is empty before it was asked."""
    pulled = pulled_servers(call_log_copy_path(config.state_dir)) if config.serving.call_log is not None else {}
    none = PulledServer("", condition="" if config.serving.call_log is not None else OFF)
    keys = ("condition", "error", "calls", "missed", "dropped")
    return {url: {key: getattr(pulled.get(url, none), key) for key in keys} for url in config.serving.urls}


def _left_out(counts: Mapping[Exclusion, int], others: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tasks that rounds leave out, with reason and remedy; `others` counts the replies of other models."""
    models = ", ".join(f"{name} {number}" for name, number in islice(others.items(), MODELS_SHOWN))
    return [
        {
            "reason": each.value,
            "tasks": number,
            "why": f"{WORDS[each].why} ({models})" if each is Exclusion.MODEL and models else WORDS[each].why,
            "do": WORDS[each].remedy,
        }
        for each, number in counts.items()
    ]


def _available(conn: Connection, config: Config) -> tuple[AvailableSamples, list[str]]:
    """The supply of a round. For an invalid chain: the supply without it, and the error."""
    try:
        return AvailableSamplesCache(config).now(conn), []
    except ConfigError as error:
        without = config.model_copy(update={"filter": config.filter.model_copy(update={"chain": None})})
        return AvailableSamplesCache(without).now(conn), [str(error)]


def _warnings(conn: Connection, config: Config) -> list[str]:
    """Conditions that prevent progress without a failure."""
    found = (
        task_file.warning(conn),
        verdicts.none_accepted(conn, config.filter.warn_window),
        splits.empty_split(conn, config.ingest.train_ratio),
    )
    return [warning for warning in found if warning]


def _judge(conn: Connection, config: Config) -> dict[str, Any]:
    """The error that judging waits for, and the usage in total and by purpose."""
    by_purpose = judge_usage.usage_by_purpose(conn)
    paid, currency = judge_usage.cost_by_purpose(conn, config.judge.prices) or (None, "")
    together = {name: sum(used[name] for used in by_purpose.values()) for name in by_purpose[Purpose.FILTER]}

    def with_cost(used: dict[str, int], *purposes: Purpose) -> dict[str, Any]:
        if paid is None:
            return {**used, "cost": None}
        amount = round(sum(paid[purpose] for purpose in purposes), 6)
        return {**used, "cost": {"amount": amount, "currency": currency}}

    return {
        "error": database.noted(conn, database.JUDGE_NOTE),
        "usage": with_cost(together, *Purpose),
        "by_purpose": {purpose.value: with_cost(used, purpose) for purpose, used in by_purpose.items()},
        "tokens_today": judge_usage.tokens_today(conn),
    }


def _sources(conn: Connection, config: Config) -> list[dict[str, Any]]:
    """The configured sources, and other stored ones with replies: a mistyped path is not shown permanently."""
    keys = (
        "path", "type", "condition", "schema", "open_traces", "longest_read_ms", "error", "warning",
        "read_at",
    )  # fmt: skip
    counts = ledger.counts_by_source(conn)
    found = []
    for row in ledger.all_sources(conn):
        own = {key: row[key] for key in keys}
        # The column is named `generation`, which in Studio means the schema.
        own |= {"restarts": row["generation"], **asdict(counts.get(row["id"], SourceCounts(0, 0, {}, 0)))}
        own["configured"] = source_of(config, Path(row["path"])) is not None
        if own["configured"] or own["replies"]:
            found.append(own)
    return found


def _round(row: Row[Any]) -> dict[str, Any]:
    result = row.result or {}
    comparison = result.get("comparison") or {}
    if not result and (progress := _progress(row)) is not None:
        result = {**progress, "steps": progress["step"], "reward_last": progress["reward"]}
    return {
        "round": row.name,
        **({"target": row.target} if row.target else {}),
        "state": row.state,
        "attempt": row.attempt,
        "trigger": row.trigger,
        "reason": row.reason,
        "parent": row.parent,
        "steps": result.get("steps", 0),
        "reward_first": result.get("reward_first"),
        "reward_last": result.get("reward_last"),
        "comparison": {key: value for key, value in comparison.items() if key != "scores"} or None,
        "adapter": (result.get("adapter") or {}).get("name"),
        "dir": row.dir,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
    }


def _live(row: Row[Any]) -> dict[str, Any]:
    steps = [line for line in metrics_of(Path(row.dir)) if line.get("event") == "step"]
    figures = steps[-1] if steps else {}
    measured = {key: value for key, value in figures.items() if isinstance(value, float)} or None
    return _round(row) | {"progress": _progress(row), "measured": measured}


def _progress(row: Row[Any]) -> dict[str, Any] | None:
    """The progress of a live round; None without a worker or before its first report."""
    progress = progress_of(Path(row.dir)) if row.state == RoundState.TRAINING else None
    return progress.model_dump() if progress is not None else None


def metrics_of(round_dir: Path) -> list[dict[str, Any]]:
    """The measurements of a round so far, one entry per line, without an unfinished last line."""
    try:
        lines = (round_dir / METRICS_FILE).read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    return [orjson.loads(line) for line in lines if line]
