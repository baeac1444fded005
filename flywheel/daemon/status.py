"""The facts of a state, read from the database alone, with or without a daemon: what `flywheel status --json` prints.

Its text, the metrics (`flywheel.daemon.prometheus`) and the overview page show the same facts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson
from msgspec import to_builtins
from sqlalchemy import Connection, Row

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.daemon.configured_source import source_of
from flywheel.daemon.rounds.gate_planning import next_test
from flywheel.daemon.rounds.sample_selection import AvailableSamples, AvailableSamplesCache, new_samples_needed
from flywheel.daemon.rounds.waiting import told
from flywheel.daemon.watch_figures import watch_status
from flywheel.errors import ConfigError
from flywheel.records.exclusion import WORDS, Exclusion
from flywheel.records.round import Comparison
from flywheel.records.states import LIVE_ROUND, ReplyState, RoundState, TaskState
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.serving.replica_addresses import is_name
from flywheel.sources.call_puller import OFF, PulledServer, pending_erasures, pulled_servers
from flywheel.sources.otlp.inbox import private_traces
from flywheel.store import (
    claims,
    dead_letters,
    deployments,
    gate_tests,
    judge_usage,
    ledger,
    notices,
    rounds,
    samples,
    splits,
    stages,
    task_file,
    verdicts,
)
from flywheel.store.deployments import ReplicaState
from flywheel.store.judge_usage import CallCounts
from flywheel.store.kernel import database
from flywheel.store.ledger import SourceCounts
from flywheel.store.stages import StageRecord
from flywheel.store.views import acceptance, erased_samples, left_out
from flywheel.store.views.balance import balance
from flywheel.system.lock import holder
from flywheel.training.data.round_progress import progress_of, read_steps

ROUNDS_SHOWN = 20
MODELS_SHOWN = 5
VERDICTS_SHOWN = 500
"""The newest verdicts, which `status` summarises by rejecting criterion."""
LANGFUSE: Final = "langfuse"
"""The stage that sends scores to Langfuse."""
NOT_INSPECTED: Final = ReplicaState("", "", "", None, None)
"""What is shown of a configured server before its first inspection."""

Facts = dict[str, Any]
"""Facts by the keys that `--json` prints (`json-output.json` of the reference). A value may be the record of its
source: the counts of prompts and of the newest verdicts, a `StageRecord`, the `WatchFigures` of a watch, the
`RoundProgress` of a live round, the `Comparison` of a round, without single scores."""


def as_json(facts: Facts) -> Facts:
    """Facts as `--json` prints them: without targets, what a target has is part of the whole."""
    whole: Facts = to_builtins(facts, enc_hook=lambda model: model.model_dump(mode="json", exclude={"scores"}))
    return whole | whole.pop("targets")[""] if "" in whole.get("targets", ()) else whole


def servers(facts: Facts) -> list[Facts]:
    """The servers, each once: with what it serves under all aliases, and the first error, if any."""
    by_url: dict[str, list[Facts]] = {}
    for own in facts["targets"].values():
        for server in own["replicas"]:
            by_url.setdefault(server["url"], []).append(server)
    return [
        {
            **next((one for one in same if one["error"]), same[0]),
            "serves": ", ".join(one["serves"] for one in same if one["serves"]),
        }
        for same in by_url.values()
    ]


def snapshot(conn: Connection, config: Config, no_state: str = "") -> Facts:
    """All facts. `targets` has those of each target, under an empty name without targets; `no_state` says why there
    is nothing to show."""
    books = balance(conn)
    records = stages.records(conn)
    by_adapter, others = acceptance.by_adapter(conn, config.models_of(None))
    warnings: list[str] = []
    targets = {name: _target(conn, own, warnings) for name, own in config.by_target().items()}
    shown = [_round(conn, config, row) for row in _shown_rounds(conn)]
    by_state = rounds.count_by_state(conn)
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
        "prompts": samples.count_prompts(conn),
        "left_out": _left_out(left_out.count_left_out(conn, config.takes), others),
        "due": claims.count_due(conn),
        "judge": _judge(conn, config, records.get(notices.JUDGE, StageRecord()).error),
        "recent_verdicts": verdicts.recent(conn, VERDICTS_SHOWN),
        "warnings": [*dict.fromkeys(warnings), *_warnings(conn, config)],
        "waiting_for": database.noted(conn, database.ROUND_NOTE),
        "next_cron_times": config.trigger.next_cron_times,
        "rounds": shown,
        "rounds_by_state": by_state,
        "promoted": by_state[RoundState.PROMOTED],
        "live_round": next((_live(each) for each in shown if each["state"] in LIVE_ROUND), None),
        "gate_decisions": gate_tests.decisions(conn),
        "by_adapter": by_adapter,
        "other_models": others,
        "dead_letters": dead_letters.count(conn)["open"],
        "langfuse": _langfuse(conn, config, records.get(LANGFUSE, StageRecord()).error),
        "stages": records,
        "targets": targets,
        "no_state": no_state,
    }


def _target(conn: Connection, config: Config, warnings: list[str]) -> Facts:
    """Samples, gate, deployment and servers of the target whose settings these are. Adds to the warnings."""
    alias = config.model.alias
    available = _available(conn, config, warnings)
    if available.notice:
        warnings.append(f"{config.target}: {available.notice}" if config.target else available.notice)
    needed = new_samples_needed(conn, config, config.trigger.min_samples)
    planned = next_test(conn, config)
    active = deployments.active(conn, alias)
    watch = watch_status(conn, alias)
    warnings += watch["figures"].warnings if watch is not None else []
    return {
        "free_samples": available.usable,
        "waiting_samples": available.waiting,
        "new_samples": {
            "free": needed.new,
            "needed": needed.needed,
            "rounds_without_promotion": needed.rounds,
            "wait": needed.wait,
        },
        "min_samples": config.trigger.min_samples,
        "held_out": samples.count_held_out(conn, config.takes.gate),
        "gate": {
            "epoch": planned.test.epoch,
            "test": planned.test.number,
            "alpha": planned.test.alpha,
            "conversations": planned.conversations,
            "power": round(planned.power, 4),
            "missing": planned.missing,
            "shortfall": planned.shortfall,
        },
        "swaps": deployments.outcomes(conn, alias),
        "deployment": {
            "alias": alias,
            "adapter": active.adapter if active else None,
            "since": active.activated_at if active else None,
            "previous": active.previous if active else None,
            "reason": active.reason if active else "",
        },
        "watch": watch,
        "replicas": _replicas(conn, config),
    }


def _replicas(conn: Connection, config: Config) -> list[Facts]:
    """The servers as they were last inspected; `calls` is what was pulled from the call log of each."""
    inspected = deployments.replica_states(conn, config.model.alias)
    is_recorded, path = config.serving.call_log is not None, call_log_copy_path(config.state_dir)
    pulled, pending = (pulled_servers(path), pending_erasures(path)) if is_recorded else ({}, {})
    none = PulledServer("", condition="" if is_recorded else OFF)
    keys = ("condition", "error", "calls", "missed", "dropped", "refused")
    return [
        {
            "url": url,
            **asdict(inspected.get(url, NOT_INSPECTED)),
            "calls": {
                **{key: getattr(pulled.get(url, none), key) for key in keys},
                "to_erase": pending.get(url, 0),
            },
        }
        for url in _servers(config, inspected)
    ]


def _servers(config: Config, inspected: Collection[str]) -> list[str]:
    """The URLs of all servers. Of a name, those that the daemon found when it last inspected them."""
    names = [url for url in config.serving.urls if is_name(url)]
    others = [url for url in config.serving.urls if url not in names]
    return [*others, *([url for url in inspected if url not in others] or names)] if names else others


def _left_out(counts: Mapping[Exclusion, int], others: Mapping[str, int]) -> list[Facts]:
    """Tasks that rounds leave out, with reason and remedy; `others` counts the replies of other models."""
    models = ", ".join(f"{name} {number}" for name, number in islice(others.items(), MODELS_SHOWN))
    named = {Exclusion.MODEL: f" ({models})"} if models else {}
    return [
        {
            "reason": reason.value,
            "tasks": number,
            "why": f"{WORDS[reason].why}{named.get(reason, '')}",
            "do": WORDS[reason].remedy,
        }
        for reason, number in counts.items()
    ]


def _available(conn: Connection, config: Config, warnings: list[str]) -> AvailableSamples:
    """What a round could take. For an invalid chain: what it could take without it, and the error as a warning."""
    try:
        return AvailableSamplesCache(config).now(conn)
    except ConfigError as error:
        warnings.append(str(error))
        without = config.model_copy(update={"filter": config.filter.model_copy(update={"chain": None})})
        return AvailableSamplesCache(without).now(conn)


def _warnings(conn: Connection, config: Config) -> list[str]:
    """Conditions that prevent progress without a failure."""
    warnings = (
        task_file.warning(conn),
        verdicts.none_accepted(conn, config.filter.warn_window),
        splits.empty_split(conn, config.ingest.train_ratio),
        *erased_samples.warnings(conn),
    )
    return [warning for warning in warnings if warning]


def _judge(conn: Connection, config: Config, error: str) -> Facts:
    """The error that judging waits for, and the usage in total and by purpose; no cost if no price was ever known."""
    by_purpose = judge_usage.usage_by_purpose(conn)
    paid, currency = judge_usage.cost_by_purpose(conn, config.judge.prices) or ({}, "")

    def usage(counts: CallCounts, amount: float) -> Facts:
        return counts._asdict() | {"cost": {"amount": round(amount, 6), "currency": currency} if paid else None}

    return {
        "error": error,
        "usage": usage(CallCounts(*map(sum, zip(*by_purpose.values(), strict=True))), sum(paid.values())),
        "by_purpose": {each.value: usage(counts, paid.get(each, 0.0)) for each, counts in by_purpose.items()},
        "tokens_today": judge_usage.tokens_today(conn),
    }


def _langfuse(conn: Connection, config: Config, error: str) -> Facts | None:
    """The scores that Langfuse took, those that it refused, and the replies whose trace has no id of OpenTelemetry;
    `error` says why nothing is sent, if so."""
    if (settings := config.export.langfuse) is None:
        return None
    noted = orjson.loads(database.noted(conn, settings.note_key) or "{}")
    counts = {name: noted.get(name, 0) for name in ("sent", "refused", "untraced")}
    return {"server": settings.server, **counts, "error": error}


def _sources(conn: Connection, config: Config) -> list[Facts]:
    """The configured sources, and other stored ones with replies: a mistyped path is not shown permanently."""
    counts = ledger.counts_by_source(conn)
    of_row = ("path", "type", "condition", "schema", "open_traces", "longest_read_ms", "error", "warning", "read_at")
    sources = [
        {
            **{name: row._mapping[name] for name in of_row},
            # In Studio a generation is one of the schema.
            "restarts": row.generation,
            **asdict(counts.get(row.id, SourceCounts(0, 0, {}, 0))),
            "configured": source_of(config, Path(row.path)) is not None,
            "private_traces": private_traces(Path(row.path)) if row.type == "otlp" else 0,
        }
        for row in ledger.all_sources(conn)
    ]
    return [source for source in sources if source["configured"] or source["replies"]]


def _round(conn: Connection, config: Config, row: Row[Any]) -> Facts:
    """A round; of one that trains, `steps` and rewards are those of its progress, and one whose candidate waits says
    what for."""
    result = row.result or {}
    if not result and row.state == RoundState.TRAINING and (progress := progress_of(Path(row.dir))) is not None:
        result = {"steps": progress.step, "reward_first": progress.reward_first, "reward_last": progress.reward}
    comparison = result.get("comparison")
    of_row = ("state", "attempt", "trigger", "reason", "parent", "dir", "created_at", "finished_at")
    return {
        "round": row.name,
        **({"target": row.target} if row.target else {}),
        **{name: row._mapping[name] for name in of_row},
        "steps": result.get("steps", 0),
        "reward_first": result.get("reward_first"),
        "reward_last": result.get("reward_last"),
        "comparison": Comparison.model_validate(comparison | {"scores": []}) if comparison else None,
        "adapter": (result.get("adapter") or {}).get("name"),
        **{name: value for name, value in told(conn, config, row).items() if value},
    }


def _shown_rounds(conn: Connection) -> list[Row[Any]]:
    """The newest rounds, and older ones whose candidates wait."""
    newest = rounds.newest(conn, ROUNDS_SHOWN)
    shown = {row.id for row in newest}
    return [*(row for row in rounds.passed(conn) if row.id not in shown), *newest]


def _live(entry: Facts) -> Facts:
    """The unfinished round: with its progress, None without a worker or before its first report, and the figures of
    its last step."""
    directory = Path(entry["dir"])
    figures = [{}, *read_steps(directory)][-1]
    measured = {key: value for key, value in figures.items() if isinstance(value, float)}
    progress = progress_of(directory) if entry["state"] == RoundState.TRAINING else None
    return entry | {"progress": progress, "measured": measured or None}
