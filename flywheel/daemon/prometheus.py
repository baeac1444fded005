"""The status in Prometheus' text format, for node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Labelled = Iterable[tuple[tuple[str, ...], float]]
"""Values with their label values."""


def exposition(state: dict[str, Any]) -> bytes:
    """The metrics of `status.snapshot`, in UTF-8. Samples have no timestamps: the collector refuses them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(state))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from _of_program(self._state)
        yield from _of_pipeline(self._state)
        yield from _of_sources(self._state["sources"])
        yield from _of_judge(self._state["judge"])
        yield _by(
            "recent_rejections",
            "The newest verdicts that did not accept, by the criterion that was not met.",
            "criterion",
            self._state["recent_verdicts"]["rejected_by"],
        )
        yield from _of_rounds(self._state)
        yield from _of_live_round(self._state["live_round"])
        yield from _of_replicas(self._state["replicas"])


def _of_program(state: dict[str, Any]) -> Iterator[Metric]:
    yield _gauge("info", "The version that wrote this; always 1.", ("version",), [((state["version"],), 1)])
    yield _number("daemon_up", "Whether a daemon holds the state directory.", state["daemon"]["pid"] is not None)
    yield _number("balanced", "Whether every reply is accounted for, see `flywheel audit`.", state["balanced"])
    yield _number("dead_letters_open", "Dead letters that are neither retried nor dropped.", state["dead_letters"])


def _of_pipeline(state: dict[str, Any]) -> Iterator[Metric]:
    yield _by("replies", "Replies in the ledger by state.", "state", state["replies"])
    yield _by("skipped_replies", "Replies that became no task, by reason.", "reason", state["skipped"])
    yield _by("tasks", "Tasks by state.", "state", state["tasks"])
    yield _number("tasks_due", "Tasks that could be judged now.", state["due"])
    yield _number("samples_free", "Accepted training samples that a round could take now.", state["free_samples"])
    waiting = "Accepted training samples that no round could take now, by reason."
    yield _by("samples_waiting", waiting, "reason", state["waiting_samples"])
    yield _number("samples_needed", "Free samples that start a round.", state["min_samples"])
    left_out = {each["reason"]: each["tasks"] for each in state["left_out"]}
    yield _by("tasks_left_out", "Tasks that rounds leave out, by reason; one may have several.", "reason", left_out)
    yield _number("samples_held_out", "Accepted samples that are never trained on.", state["held_out"])


def _of_sources(sources: list[dict[str, Any]]) -> Iterator[Metric]:
    def each(name: str, text: str, value: str) -> Metric:
        values = [((source["path"],), float(source[value])) for source in sources]
        return _gauge(f"source_{name}", text, ("source",), values)

    # A source that is no longer configured has no condition.
    conditions = [
        ((source["path"], source["condition"] or "not read yet"), 1.0) for source in sources if source["configured"]
    ]
    yield _gauge("source_condition", "The condition that a source is in; 1.", ("source", "condition"), conditions)
    read = [((source["path"],), _seconds(source["read_at"])) for source in sources if source["read_at"]]
    yield _gauge(
        "source_noted_timestamp_seconds", "When something about reading a source last changed.", ("source",), read
    )
    longest = [((source["path"],), round(source["longest_read_ms"] / 1000, 6)) for source in sources]
    yield _gauge(
        "source_longest_read_seconds", "The longest read transaction on a source, in seconds.", ("source",), longest
    )
    yield each("open_traces", "Traces that are waited for.", "open_traces")
    yield each("restarts", "How often reading started over: the file was replaced, restored or migrated.", "restarts")
    yield each("replies", "Replies of a source in the ledger.", "replies")
    yield each("tasks", "Replies of a source that became tasks.", "tasks")
    yield each("dead", "Rows of a source that could not be understood.", "dead")
    skipped = [
        ((source["path"], reason), float(number))
        for source in sources
        for reason, number in source["skipped"].items()
    ]
    yield _gauge("source_skipped", "Replies of a source that became no task.", ("source", "reason"), skipped)


def _of_judge(judge: dict[str, Any]) -> Iterator[Metric]:
    purposes = judge["by_purpose"]
    calls = CounterMetricFamily("flywheel_judge_calls", "Calls of the judge by purpose.", labels=("purpose",))
    tokens = CounterMetricFamily(
        "flywheel_judge_tokens", "Tokens of those calls by kind.", labels=("purpose", "kind")
    )
    for purpose, used in purposes.items():
        calls.add_metric((purpose,), used["calls"])
        for kind in ("prompt", "completion"):
            tokens.add_metric((purpose, kind), used[f"{kind}_tokens"])
    yield calls
    yield tokens
    costs = [
        ((purpose, used["cost"]["currency"]), used["cost"]["amount"])
        for purpose, used in purposes.items()
        if used["cost"] is not None
    ]
    yield _gauge("judge_cost", "What those tokens cost by today's judge.prices.", ("purpose", "currency"), costs)
    yield _number("judge_tokens_today", "Tokens, sent and received, since midnight UTC.", judge["tokens_today"])
    yield _number("judge_failing", "Whether judging is stopped by an error.", bool(judge["error"]))


def _of_rounds(state: dict[str, Any]) -> Iterator[Metric]:
    yield _by("rounds", "Training rounds by state.", "state", state["rounds_by_state"])
    deployed = state["deployment"]
    active = ((deployed["alias"], deployed["adapter"] or ""), 1.0)
    yield _gauge(
        "active_adapter", "What an alias points at (empty: the base model); 1.", ("alias", "adapter"), [active]
    )
    since = [((deployed["alias"],), _seconds(deployed["since"]))] if deployed["since"] else []
    yield _gauge("active_adapter_since_timestamp_seconds", "When the alias was pointed at it.", ("alias",), since)
    shares = [
        ((entry["adapter"],), entry["acceptance"]) for entry in state["by_adapter"] if entry["acceptance"] is not None
    ]
    yield _gauge("adapter_acceptance_ratio", "Accepted of an adapter's judged answers, 0 to 1.", ("adapter",), shares)


def _of_live_round(live: dict[str, Any] | None) -> Iterator[Metric]:
    progress = live["progress"] if live is not None else None

    def number(name: str, text: str, key: str) -> Metric:
        value = progress[key] if progress is not None else None
        return _gauge(f"live_round_{name}", text, (), [] if value is None else [((), float(value))])

    phases = [((live["round"], progress["phase"]), 1.0)] if live is not None and progress is not None else []
    yield _gauge("live_round_phase", "What the worker of the running round does; 1.", ("round", "phase"), phases)
    yield number("step", "Steps of the running round that are done.", "step")
    yield number("steps", "Steps that the running round has.", "steps")
    yield number("reward", "Mean reward of the last step that is done.", "reward")
    yield number("rollouts", "Rollouts of the step under way, or of the comparison, that are done.", "rollouts")
    yield number("rollouts_planned", "Rollouts of the step under way, or of the comparison.", "rollouts_planned")
    yield number("tokens_per_second", "Tokens that the rollout engines generate in a second.", "tokens_per_second")
    yield number("left_seconds", "About how long the running round still takes.", "seconds_left")
    paused = [] if progress is None else [((), float(bool(progress["paused"])))]
    yield _gauge("live_round_paused", "Whether the running round waits for something.", (), paused)


def _of_replicas(replicas: list[dict[str, Any]]) -> Iterator[Metric]:
    conditions = [((each["url"], each["condition"] or "not looked at yet"), 1.0) for each in replicas]
    yield _gauge(
        "replica_condition", "The condition that an inference server is in; 1.", ("replica", "condition"), conditions
    )
    serving = [((each["url"], each["serves"]), 1.0) for each in replicas if each["serves"]]
    yield _gauge("replica_serves", "The model that the alias stands for there; 1.", ("replica", "model"), serving)
    looked = [((each["url"],), _seconds(each["looked_at"])) for each in replicas if each["looked_at"]]
    yield _gauge("replica_looked_timestamp_seconds", "When a server was last looked at.", ("replica",), looked)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Labelled) -> Metric:
    metric = GaugeMetricFamily(f"flywheel_{name}", text, labels=labels)
    for where, value in values:
        metric.add_metric(where, value)
    return metric


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    return _gauge(name, text, (label,), [((key,), float(number)) for key, number in counts.items()])


def _number(name: str, text: str, value: float) -> Metric:
    return _gauge(name, text, (), [((), float(value))])


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
