"""The status in Prometheus' text format: for a scrape of the daemon, or for node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from flywheel.daemon.status import JudgeStatus, LiveRound, SourceStatus, Status, TargetStatus
from flywheel.judge.call_seconds import CALL_SECONDS
from flywheel.store import notices
from flywheel.store.stages import StageRecord


def exposition(status: Status) -> bytes:
    """The metrics of a status and of this process, in UTF-8.

    Samples have no timestamps: the textfile collector refuses them.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusMetrics(status))
    return generate_latest(registry)


class _StatusMetrics(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield _gauge("info", "The version that wrote this; always 1.", {status.version: 1}, "version")
        yield _gauge("daemon_up", "Whether a daemon holds the state directory.", status.daemon.pid is not None)
        yield _gauge("balanced", "Whether every reply is accounted for, see `flywheel audit`.", status.balanced)
        yield _gauge("dead_letters_open", "Dead letters that are neither retried nor dropped.", status.dead_letters)
        yield from _of_pipeline(status)
        yield from _of_sources(status.sources)
        yield from _of_stages(status.stages)
        yield from _of_judge(status.judge)
        text = "The newest verdicts that did not accept, by the criterion that was not met."
        yield _gauge("recent_rejections", text, status.recent_verdicts.rejected_by, "criterion")
        yield from _of_rounds(status)
        yield from _of_live_round(status.live_round)
        yield from _of_replicas(status)


def _of_pipeline(status: Status) -> Iterator[Metric]:
    yield _gauge("replies", "Replies in the ledger by state.", status.replies, "state")
    yield _gauge("skipped_replies", "Replies that became no task, by reason.", status.skipped, "reason")
    yield _gauge("tasks", "Tasks by state.", status.tasks, "state")
    yield _gauge("tasks_due", "Tasks that could be judged now.", status.due)
    free = "Accepted training samples that a round could take now."
    yield _of_targets("samples_free", free, status, lambda own: own.free_samples)
    waiting = "Accepted training samples that no round could take now, by reason."
    yield _of_targets("samples_waiting", waiting, status, lambda own: own.waiting_samples, "reason")
    needed = "Free samples that start a round."
    yield _of_targets("samples_needed", needed, status, lambda own: own.min_samples)
    prompts = status.prompts
    yield _gauge("prompts", "Tasks that were not withdrawn.", prompts.tasks)
    yield _gauge("prompts_exact", "Those of them whose prompt is exactly what the model was sent.", prompts.exact)
    text = "The others by reason; one may have several."
    yield _gauge("prompts_inexact", text, prompts.inexact, "reason")
    left_out = {each.reason: each.tasks for each in status.left_out}
    yield _gauge(
        "tasks_left_out", "Tasks that rounds leave out, by reason; one may have several.", left_out, "reason"
    )
    held_out = "Accepted samples that are never trained on."
    yield _of_targets("samples_held_out", held_out, status, lambda own: own.held_out)


def _of_sources(sources: list[SourceStatus]) -> Iterator[Metric]:
    def of_each(name: str, text: str, value: Callable[[SourceStatus], float]) -> Metric:
        return _gauge(f"source_{name}", text, {source.path: value(source) for source in sources}, "source")

    # A source that is no longer configured has no condition.
    conditions = {(each.path, each.condition or "not read yet"): 1 for each in sources if each.configured}
    yield _gauge("source_condition", "The condition that a source is in; 1.", conditions, "source", "condition")
    read = {each.path: _seconds(each.read_at) for each in sources if each.read_at}
    text = "When something about reading a source last changed."
    yield _gauge("source_noted_timestamp_seconds", text, read, "source")
    text = "The longest read transaction on a source, in seconds."
    yield of_each("longest_read_seconds", text, lambda source: round(source.longest_read_ms / 1000, 6))
    yield of_each("open_traces", "Traces that are waited for.", lambda source: source.open_traces)
    text = "How often reading started over: the file was replaced, restored or migrated, or a line of it retried."
    yield of_each("restarts", text, lambda source: source.restarts)
    yield of_each("replies", "Replies of a source in the ledger.", lambda source: source.replies)
    yield of_each("tasks", "Replies of a source that became tasks.", lambda source: source.tasks)
    yield of_each("dead", "Rows of a source that could not be understood.", lambda source: source.dead)
    text = "Traces of which nothing was stored when they were received."
    yield of_each("private_traces", text, lambda source: source.private_traces)
    skipped = {(each.path, reason): count for each in sources for reason, count in each.skipped.items()}
    yield _gauge("source_skipped", "Replies of a source that became no task.", skipped, "source", "reason")


def _of_stages(stages: Mapping[str, StageRecord]) -> Iterator[Metric]:
    failing = {name: bool(each.failing_since) for name, each in stages.items()}
    yield _gauge("stage_failing", "Whether a stage of the daemon fails.", failing, "stage")
    worked = {name: _seconds(each.last_ok) for name, each in stages.items() if each.last_ok}
    yield _gauge("stage_last_ok_timestamp_seconds", "When the work of a stage last succeeded.", worked, "stage")
    yield _gauge("judge_failing", "Whether judging is stopped by an error.", failing.get(notices.JUDGE, False))


def _of_judge(judge: JudgeStatus) -> Iterator[Metric]:
    calls = CounterMetricFamily("flywheel_judge_calls", "Calls of the judge by purpose.", labels=["purpose"])
    tokens = CounterMetricFamily(
        "flywheel_judge_tokens", "Tokens of those calls by kind.", labels=["purpose", "kind"]
    )
    costs = {}
    for purpose, used in judge.by_purpose.items():
        calls.add_metric([purpose], used.calls)
        tokens.add_metric([purpose, "prompt"], used.prompt_tokens)
        tokens.add_metric([purpose, "completion"], used.completion_tokens)
        if used.cost is not None:
            costs[purpose, used.cost.currency] = used.cost.amount
    yield calls
    yield tokens
    yield _gauge(
        "judge_cost", "What those tokens cost by judge.prices at the time of the calls.", costs, "purpose", "currency"
    )
    yield _gauge("judge_tokens_today", "Tokens, sent and received, since midnight UTC.", judge.tokens_today)
    yield from CALL_SECONDS.collect()


def _of_rounds(status: Status) -> Iterator[Metric]:
    yield _gauge("rounds", "Training rounds by state.", status.rounds_by_state, "state")
    text = "Comparisons of a candidate with the deployed adapter, by the decision."
    yield _counter("gate_decisions", text, status.gate_decisions, "decision")
    compared = next((each.comparison for each in status.rounds if each.comparison), None)
    bounds = {name: getattr(compared, name) for name in ("gain", "lower", "upper")} if compared is not None else {}
    text = "The gain that the newest comparison found, and the bounds of its interval."
    yield _gauge("gate_gain", text, bounds, "bound")
    values, labels = _by_target(status, lambda own: own.swaps, "outcome")
    yield _counter("swaps", "Swaps of the alias, by outcome.", values, *labels)
    deployed = [own.deployment for own in status.targets.values()]
    text = "What an alias points at (empty: the base model); 1."
    active = {(each.alias, each.adapter or ""): 1 for each in deployed}
    yield _gauge("active_adapter", text, active, "alias", "adapter")
    since = {each.alias: _seconds(each.since) for each in deployed if each.since}
    yield _gauge("active_adapter_since_timestamp_seconds", "When the alias was pointed at it.", since, "alias")
    watched = [(own.deployment.alias, own.watch.figures) for own in status.targets.values() if own.watch]
    units = {
        (alias, arm.version, outcome): getattr(arm, outcome)
        for alias, figures in watched
        for arm in (figures.old, figures.new)
        for outcome in ("successes", "failures", "missing", "waiting")
    }
    text = "Conversations of a promotion that is watched, by version and outcome."
    yield _gauge("watch_conversations", text, units, "alias", "version", "outcome")
    text = "The e-value of each test whether the new version is worse: rolled back at 25 (outcomes) or 100 (missing)."
    tests = {(alias, "outcomes"): figures.e_value for alias, figures in watched}
    tests |= {(alias, "missing"): figures.e_value_missing for alias, figures in watched}
    yield _gauge("watch_e_value", text, tests, "alias", "test")
    shares = {each.adapter: each.acceptance for each in status.by_adapter if each.acceptance is not None}
    yield _gauge("adapter_acceptance_ratio", "Accepted of an adapter's judged answers, 0 to 1.", shares, "adapter")


def _of_live_round(live: LiveRound | None) -> Iterator[Metric]:
    progress = live.progress if live is not None else None

    def number(name: str, text: str, key: str) -> Metric:
        return _gauge(f"live_round_{name}", text, getattr(progress, key, None))

    phases = {(live.round, progress.phase): 1} if live is not None and progress is not None else {}
    yield _gauge("live_round_phase", "What the worker of the running round does; 1.", phases, "round", "phase")
    yield number("step", "Steps of the running round that are done.", "step")
    yield number("steps", "Steps that the running round has.", "steps")
    yield number("reward", "Mean reward of the last step that is done.", "reward")
    yield number("rollouts", "Rollouts of the step under way, or of the comparison, that are done.", "rollouts")
    yield number("rollouts_planned", "Rollouts of the step under way, or of the comparison.", "rollouts_planned")
    yield number("tokens_per_second", "Tokens that the rollout engines generate in a second.", "tokens_per_second")
    yield number("left_seconds", "About how long the running round still takes.", "seconds_left")
    measured = (live.measured if live is not None else None) or {}
    for name, text in MEASURED.items():
        yield _gauge(f"live_round_{name}", f"{text}, of the last step.", measured.get(name))
    paused = bool(progress.paused) if progress is not None else None
    yield _gauge("live_round_paused", "Whether the running round waits for something.", paused)


def _of_replicas(status: Status) -> Iterator[Metric]:
    replicas = status.servers
    conditions = {(each.url, each.condition or "not looked at yet"): 1 for each in replicas}
    text = "The condition that an inference server is in; 1."
    yield _gauge("replica_condition", text, conditions, "replica", "condition")
    seen = [each for own in status.targets.values() for each in own.replicas]
    serving = {(each.url, each.serves): 1 for each in seen if each.serves}
    yield _gauge("replica_serves", "The model that the alias stands for there; 1.", serving, "replica", "model")
    looked = {each.url: _seconds(each.looked_at) for each in replicas if each.looked_at}
    yield _gauge("replica_looked_timestamp_seconds", "When a server was last looked at.", looked, "replica")
    calls = {each.url: each.calls for each in replicas if each.calls.condition}
    states = {(url, each.condition): 1 for url, each in calls.items()}
    yield _gauge("call_log_condition", "The condition of a server's call log; 1.", states, "replica", "condition")
    for name, key, help_text in (
        ("calls_pulled", "calls", "Recorded calls that were pulled from a server."),
        ("calls_missed", "missed", "Recorded calls that a server had pruned before they were pulled."),
        ("calls_dropped", "dropped", "Calls that a server could not record."),
        ("calls_refused", "refused", "Calls that a server was not to record."),
    ):
        metric = CounterMetricFamily(f"flywheel_{name}", help_text, labels=["replica"])
        for url, each in calls.items():
            metric.add_metric([url], getattr(each, key))
        yield metric
    to_erase = {url: each.to_erase for url, each in calls.items()}
    yield _gauge("calls_to_erase", "Recorded calls that are to be erased on a server still.", to_erase, "replica")


MEASURED: Final = {
    "reward_std": "Standard deviation of the rewards",
    "loss": "Loss",
    "grad_norm": "Norm of the gradient",
    "entropy": "Mean entropy of the trained tokens, in nats",
    "kl": "Divergence from the policy that the round starts from, in nats a token (training.beta above 0)",
    "logprob_gap": "Mean difference of trainer and engine log-probabilities",
    "completion_tokens_mean": "Mean length of the rollouts in tokens",
    "truncated_share": "Share of rollouts that reached their maximum length",
}
"""Figures of a step (`metrics.jsonl`) that are metrics."""


def _by_target(
    status: Status, value: Callable[[TargetStatus], Mapping[str, float] | float], *labels: str
) -> tuple[Mapping[Any, float] | float, tuple[str, ...]]:
    """A figure of each target, and its labels: with the target's name if there are several."""
    values = {name: value(own) for name, own in status.targets.items()}
    if "" in values:
        return values[""], labels
    figures: dict[Any, float] = {}
    for name, figure in values.items():
        figures |= (
            {(name, where): each for where, each in figure.items()} if isinstance(figure, Mapping) else {name: figure}
        )
    return figures, ("target", *labels)


def _of_targets(
    name: str, text: str, status: Status, value: Callable[[TargetStatus], Mapping[str, float] | float], *labels: str
) -> Metric:
    values, labels = _by_target(status, value, *labels)
    return _gauge(name, text, values, *labels)


def _counter(name: str, text: str, values: Any, *labels: str) -> Metric:
    metric = CounterMetricFamily(f"flywheel_{name}", text, labels=labels)
    for where, value in values.items():
        metric.add_metric([where] if isinstance(where, str) else where, value)
    return metric


def _gauge(name: str, text: str, values: Mapping[Any, float] | float | None, *labels: str) -> Metric:
    """A metric of one value, of none, or of one for each value of its label (or each tuple of its labels' values)."""
    metric = GaugeMetricFamily(f"flywheel_{name}", text, labels=labels)
    if not isinstance(values, Mapping):
        values = {} if values is None else {(): values}
    for where, value in values.items():
        metric.add_metric([where] if isinstance(where, str) else where, float(value))
    return metric


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
