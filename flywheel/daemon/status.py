"""`flywheel status`: a snapshot of the whole state, read from the database alone, with or without a daemon."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson
from msgspec import Struct, to_builtins
from msgspec.structs import replace
from pydantic import BaseModel
from sqlalchemy import Connection, Row

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.daemon.configured_source import source_of
from flywheel.daemon.rounds.gate_planning import next_test
from flywheel.daemon.rounds.sample_selection import AvailableSamples, AvailableSamplesCache, new_samples_needed
from flywheel.daemon.rounds.waiting import told
from flywheel.daemon.watch_figures import WatchStatus, watch_status
from flywheel.errors import ConfigError
from flywheel.records.exclusion import WORDS, Exclusion
from flywheel.records.round import METRICS_FILE, Comparison
from flywheel.records.states import ReplyState, RoundState, TaskState
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
from flywheel.store.samples import PromptCounts
from flywheel.store.stages import StageRecord
from flywheel.store.verdicts import RecentVerdicts
from flywheel.store.views import acceptance, erased_samples, left_out
from flywheel.store.views.acceptance import AdapterAcceptance
from flywheel.store.views.balance import balance
from flywheel.system.lock import holder
from flywheel.training.data.round_progress import RoundProgress, progress_of

ROUNDS_SHOWN = 20
MODELS_SHOWN = 5
VERDICTS_SHOWN = 500
"""The newest verdicts, which `status` summarises by rejecting criterion."""
LANGFUSE: Final = "langfuse"
"""The stage that sends scores to Langfuse."""
NOT_INSPECTED: Final = ReplicaState("", "", "", None, None)
"""What is shown of a configured server before its first inspection."""


class SourceStatus(Struct, frozen=True):
    """A source that is configured, or has replies. `schema` is what a Studio database was found to have.
    `private_traces` counts those of which nothing was stored when they were received."""

    path: str
    type: str
    condition: str
    schema: str
    open_traces: int
    longest_read_ms: float
    error: str
    warning: str
    read_at: str | None
    restarts: int
    replies: int
    tasks: int
    skipped: Mapping[str, int]
    dead: int
    erased: int
    pending: int
    configured: bool
    private_traces: int


class LeftOutTasks(Struct, frozen=True):
    """Tasks that rounds leave out, with reason and remedy."""

    reason: str
    tasks: int
    why: str
    do: str


class DaemonStatus(Struct, frozen=True):
    """The process that holds the instance lock; None without one."""

    pid: int | None


class Price(Struct, frozen=True):
    amount: float
    currency: str


class UsageStatus(Struct, frozen=True):
    """`cost` is None if no price was ever known."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: Price | None


class JudgeStatus(Struct, frozen=True):
    """The error that judging waits for, and the usage in total and by purpose."""

    error: str
    usage: UsageStatus
    by_purpose: Mapping[str, UsageStatus]
    tokens_today: int


class NewSamplesStatus(Struct, frozen=True):
    free: int
    needed: int
    rounds_without_promotion: int
    wait: str


class NextTestStatus(Struct, frozen=True):
    """The test of the next round, as `gate_planning.NextTest`; `test` is its number in the epoch."""

    epoch: int
    test: int
    alpha: float
    conversations: int
    power: float
    missing: int | None
    shortfall: str


class DeploymentStatus(Struct, frozen=True):
    """`adapter` is None for the base model."""

    alias: str
    adapter: str | None
    since: str | None
    previous: str | None
    reason: str


class CallsStatus(Struct, frozen=True):
    """What was pulled from the call log of a server; `condition` is empty before it was asked. `refused` counts the
    calls that were not to be recorded, `to_erase` those that are to be erased there still."""

    condition: str
    error: str
    calls: int
    missed: int
    dropped: int
    refused: int
    to_erase: int


class ServerStatus(Struct, frozen=True):
    """An inference server as it was last inspected; `condition` is empty before that. `serves` is what the alias
    stands for there."""

    url: str
    condition: str
    serves: str
    error: str
    since: str | None
    looked_at: str | None
    calls: CallsStatus


class TargetStatus(Struct, frozen=True):
    """Samples, gate, deployment and servers of one target."""

    free_samples: int
    waiting_samples: Mapping[str, int]
    new_samples: NewSamplesStatus
    min_samples: int
    held_out: int
    gate: NextTestStatus
    swaps: Mapping[str, int]
    deployment: DeploymentStatus
    watch: WatchStatus | None
    replicas: list[ServerStatus]


class RoundStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A round; of a live one, `steps` and rewards are those of its progress. `comparison` lacks single scores.
    `waits_for` and `waits_until` are of one whose candidate waits."""

    round: str
    target: str = ""
    state: str
    attempt: int
    trigger: str
    reason: str
    parent: str | None
    steps: int
    reward_first: float | None
    reward_last: float | None
    comparison: Comparison | None
    adapter: str | None
    dir: str
    created_at: str
    finished_at: str | None
    waits_for: str = ""
    waits_until: str | None = None


class LiveRound(RoundStatus, frozen=True, kw_only=True, omit_defaults=True):
    """The unfinished round; `measured` are the figures of its last step."""

    progress: RoundProgress | None
    measured: Mapping[str, float] | None


class LangfuseStatus(Struct, frozen=True):
    """The scores that Langfuse took, those that it refused, and the replies whose trace has no id of OpenTelemetry;
    `error` says why nothing is sent, if so."""

    server: str
    sent: int
    refused: int
    untraced: int
    error: str


class Status(Struct, frozen=True):
    """All counts, sources, rounds and deployments. `stages` are those of the daemon, by name. `targets` has what each
    target has of its own, under an empty name without targets; `next_cron_times` are those of `trigger.cron`;
    `no_state` says why there is nothing to show."""

    version: str
    state_dir: str
    daemon: DaemonStatus
    sources: list[SourceStatus]
    replies: Mapping[str, int]
    skipped: Mapping[str, int]
    tasks: Mapping[str, int]
    balance: Mapping[str, int]
    balanced: bool
    prompts: PromptCounts
    left_out: list[LeftOutTasks]
    due: int
    judge: JudgeStatus
    recent_verdicts: RecentVerdicts
    warnings: list[str]
    waiting_for: str
    next_cron_times: list[str]
    rounds: list[RoundStatus]
    rounds_by_state: Mapping[str, int]
    promoted: int
    live_round: LiveRound | None
    gate_decisions: Mapping[str, int]
    by_adapter: list[AdapterAcceptance]
    other_models: Mapping[str, int]
    dead_letters: int
    langfuse: LangfuseStatus | None
    stages: Mapping[str, StageRecord]
    targets: Mapping[str, TargetStatus]
    no_state: str = ""

    def as_json(self) -> dict[str, Any]:
        """`flywheel status --json`: without targets, what a target has is part of the whole."""
        whole = as_json(self)
        return whole if "" not in self.targets else whole | whole.pop("targets")[""]

    @property
    def servers(self) -> list[ServerStatus]:
        """The servers, each once: with what it serves under all aliases, and the first error, if any."""
        by_url: dict[str, list[ServerStatus]] = {}
        for own in self.targets.values():
            for server in own.replicas:
                by_url.setdefault(server.url, []).append(server)
        return [
            replace(
                next((one for one in same if one.error), same[0]),
                serves=", ".join(one.serves for one in same if one.serves),
            )
            for same in by_url.values()
        ]


def as_json(record: Struct) -> dict[str, Any]:
    """A part of a status as JSON."""
    converted: dict[str, Any] = to_builtins(record, enc_hook=_model)
    return converted


def _model(value: Any) -> Any:
    assert isinstance(value, BaseModel)
    return value.model_dump(mode="json", exclude={"scores"})


def snapshot(conn: Connection, config: Config, no_state: str = "") -> Status:
    books = balance(conn)
    live = rounds.live(conn)
    records = stages.records(conn)
    by_adapter, others = acceptance.by_adapter(conn, config.models_of(None))
    of_targets = {name: _of_target(conn, own) for name, own in config.by_target().items()}
    warnings = [warning for _, own in of_targets.values() for warning in own]
    return Status(
        version=__version__,
        state_dir=str(config.state_dir),
        daemon=DaemonStatus(holder(config.state_dir)),
        sources=_sources(conn, config),
        replies={state.value: books.reply_states.get(state, 0) for state in ReplyState},
        skipped=books.skipped,
        tasks={state.value: books.task_states.get(state, 0) for state in TaskState},
        balance=books.ends,
        balanced=books.balanced,
        prompts=samples.count_prompts(conn),
        left_out=_left_out(left_out.count_left_out(conn, config.takes), others),
        due=claims.count_due(conn),
        judge=_judge(conn, config, records.get(notices.JUDGE, StageRecord())),
        recent_verdicts=verdicts.recent(conn, VERDICTS_SHOWN),
        warnings=[*dict.fromkeys(warnings), *_warnings(conn, config), *erased_samples.warnings(conn)],
        waiting_for=database.noted(conn, database.ROUND_NOTE),
        next_cron_times=config.trigger.next_cron_times,
        rounds=[RoundStatus(**_round(row), **told(conn, config, row)) for row in _shown_rounds(conn)],
        rounds_by_state={state.value: rounds.count(conn, state) for state in RoundState},
        promoted=rounds.count(conn, RoundState.PROMOTED),
        live_round=_live(live) if live is not None else None,
        gate_decisions=gate_tests.decisions(conn),
        by_adapter=by_adapter,
        other_models=others,
        dead_letters=dead_letters.count(conn)["open"],
        langfuse=_langfuse(conn, config, records.get(LANGFUSE, StageRecord())),
        stages=records,
        targets={name: own for name, (own, _) in of_targets.items()},
        no_state=no_state,
    )


def _of_target(conn: Connection, config: Config) -> tuple[TargetStatus, list[str]]:
    """The status of the target whose settings these are, and warnings."""
    alias, scope = config.model.alias, config.takes
    available, warnings = _available(conn, config)
    if available.notice:
        warnings.append(f"{config.target}: {available.notice}" if config.target else available.notice)
    needed = new_samples_needed(conn, config, config.trigger.min_samples)
    test = next_test(conn, config)
    active = deployments.active(conn, alias)
    inspected = deployments.replica_states(conn, alias)
    watch = watch_status(conn, alias)
    warnings += watch.figures.warnings if watch is not None else []
    status = TargetStatus(
        free_samples=available.usable,
        waiting_samples=available.waiting,
        new_samples=NewSamplesStatus(needed.new, needed.needed, needed.rounds, needed.wait),
        min_samples=config.trigger.min_samples,
        held_out=samples.count_held_out(conn, scope.gate),
        gate=NextTestStatus(
            test.test.epoch,
            test.test.number,
            test.test.alpha,
            test.conversations,
            round(test.power, 4),
            test.missing,
            test.shortfall,
        ),
        swaps=deployments.outcomes(conn, alias),
        deployment=DeploymentStatus(
            alias,
            active.adapter if active else None,
            active.activated_at if active else None,
            active.previous if active else None,
            active.reason if active else "",
        ),
        watch=watch,
        replicas=[
            ServerStatus(url, **asdict(inspected.get(url, NOT_INSPECTED)), calls=calls)
            for url, calls in _calls(config, _servers(config, inspected)).items()
        ],
    )
    return status, warnings


def _servers(config: Config, inspected: Collection[str]) -> list[str]:
    """The URLs of all servers. Of a name, those that the daemon found when it last inspected them."""
    names = [url for url in config.serving.urls if is_name(url)]
    others = [url for url in config.serving.urls if url not in names]
    return [*others, *([url for url in inspected if url not in others] or names)] if names else others


def _calls(config: Config, urls: Sequence[str]) -> dict[str, CallsStatus]:
    """What was pulled from the call log of each server."""
    path = call_log_copy_path(config.state_dir)
    pulled, pending = (
        (pulled_servers(path), pending_erasures(path)) if config.serving.call_log is not None else ({}, {})
    )
    none = PulledServer("", condition="" if config.serving.call_log is not None else OFF)
    servers = {url: pulled.get(url, none) for url in urls}
    return {
        url: CallsStatus(
            *(server.condition, server.error, server.calls, server.missed, server.dropped, server.refused),
            to_erase=pending.get(url, 0),
        )
        for url, server in servers.items()
    }


def _left_out(counts: Mapping[Exclusion, int], others: Mapping[str, int]) -> list[LeftOutTasks]:
    """`others` counts the replies of other models."""
    models = ", ".join(f"{name} {number}" for name, number in islice(others.items(), MODELS_SHOWN))
    named = {Exclusion.MODEL: f"{WORDS[Exclusion.MODEL].why} ({models})"} if models else {}
    return [
        LeftOutTasks(reason.value, number, named.get(reason, WORDS[reason].why), WORDS[reason].remedy)
        for reason, number in counts.items()
    ]


def _available(conn: Connection, config: Config) -> tuple[AvailableSamples, list[str]]:
    """What a round could take. For an invalid chain: what it could take without it, and the error."""
    try:
        return AvailableSamplesCache(config).now(conn), []
    except ConfigError as error:
        without = config.model_copy(update={"filter": config.filter.model_copy(update={"chain": None})})
        return AvailableSamplesCache(without).now(conn), [str(error)]


def _warnings(conn: Connection, config: Config) -> list[str]:
    """Conditions that prevent progress without a failure."""
    warnings = (
        task_file.warning(conn),
        verdicts.none_accepted(conn, config.filter.warn_window),
        splits.empty_split(conn, config.ingest.train_ratio),
    )
    return [warning for warning in warnings if warning]


def _judge(conn: Connection, config: Config, record: StageRecord) -> JudgeStatus:
    by_purpose = judge_usage.usage_by_purpose(conn)
    paid, currency = judge_usage.cost_by_purpose(conn, config.judge.prices) or (None, "")

    def usage(counts: CallCounts, amount: float) -> UsageStatus:
        return UsageStatus(*counts, cost=Price(round(amount, 6), currency) if paid is not None else None)

    total = CallCounts(*map(sum, zip(*by_purpose.values(), strict=True)))
    amounts = paid or dict.fromkeys(by_purpose, 0.0)
    return JudgeStatus(
        error=record.error,
        usage=usage(total, sum(amounts.values())),
        by_purpose={purpose.value: usage(counts, amounts[purpose]) for purpose, counts in by_purpose.items()},
        tokens_today=judge_usage.tokens_today(conn),
    )


def _langfuse(conn: Connection, config: Config, record: StageRecord) -> LangfuseStatus | None:
    if (settings := config.export.langfuse) is None:
        return None
    noted = orjson.loads(database.noted(conn, settings.note_key) or "{}")
    sent, refused, untraced = (noted.get(name, 0) for name in ("sent", "refused", "untraced"))
    return LangfuseStatus(settings.server, sent, refused, untraced, record.error)


def _sources(conn: Connection, config: Config) -> list[SourceStatus]:
    """The configured sources, and other stored ones with replies: a mistyped path is not shown permanently."""
    counts = ledger.counts_by_source(conn)
    sources = [
        SourceStatus(
            *(row.path, row.type, row.condition, row.schema, row.open_traces, row.longest_read_ms),
            *(row.error, row.warning, row.read_at),
            # In Studio a generation is one of the schema.
            restarts=row.generation,
            **asdict(counts.get(row.id, SourceCounts(0, 0, {}, 0))),
            configured=source_of(config, Path(row.path)) is not None,
            private_traces=private_traces(Path(row.path)) if row.type == "otlp" else 0,
        )
        for row in ledger.all_sources(conn)
    ]
    return [source for source in sources if source.configured or source.replies]


def _round(row: Row[Any]) -> dict[str, Any]:
    """The fields of a round's status."""
    result = row.result or {}
    if not result and (progress := _progress(row)) is not None:
        result = {"steps": progress.step, "reward_first": progress.reward_first, "reward_last": progress.reward}
    comparison = result.get("comparison")
    return {
        "round": row.name,
        "target": row.target,
        "state": row.state,
        "attempt": row.attempt,
        "trigger": row.trigger,
        "reason": row.reason,
        "parent": row.parent,
        "steps": result.get("steps", 0),
        "reward_first": result.get("reward_first"),
        "reward_last": result.get("reward_last"),
        "comparison": Comparison.model_validate(comparison | {"scores": []}) if comparison else None,
        "adapter": (result.get("adapter") or {}).get("name"),
        "dir": row.dir,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
    }


def _shown_rounds(conn: Connection) -> list[Row[Any]]:
    """The newest rounds, and older ones whose candidates wait."""
    newest = rounds.newest(conn, ROUNDS_SHOWN)
    shown = {row.id for row in newest}
    return [*(row for row in rounds.passed(conn) if row.id not in shown), *newest]


def _live(row: Row[Any]) -> LiveRound:
    steps = [line for line in metrics_of(Path(row.dir)) if line.get("event") == "step"]
    figures = steps[-1] if steps else {}
    measured = {key: value for key, value in figures.items() if isinstance(value, float)} or None
    return LiveRound(**_round(row), progress=_progress(row), measured=measured)


def _progress(row: Row[Any]) -> RoundProgress | None:
    """The progress of a live round; None without a worker or before its first report."""
    return progress_of(Path(row.dir)) if row.state == RoundState.TRAINING else None


def metrics_of(round_dir: Path) -> list[dict[str, Any]]:
    """The measurements of a round so far, one entry per line, without an unfinished last line."""
    try:
        lines = (round_dir / METRICS_FILE).read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    return [orjson.loads(line) for line in lines if line]
