"""The status in Prometheus' text format: for a scrape of the daemon, or for node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from flywheel.daemon.status import Facts, as_json, servers
from flywheel.daemon.watch_figures import WatchFigures
from flywheel.judge.call_seconds import CALL_SECONDS
from flywheel.store import notices

METRICS: Final = """
info | version.{version} | The version that wrote this; always 1.
daemon_up | daemon_up | Whether a daemon holds the state directory.
balanced | balanced | Whether every reply is accounted for, see `flywheel audit`.
dead_letters_open | dead_letters | Dead letters that are neither retried nor dropped.
replies | replies.{state} | Replies in the ledger by state.
skipped_replies | skipped.{reason} | Replies that became no task, by reason.
tasks | tasks.{state} | Tasks by state.
tasks_due | due | Tasks that could be judged now.
samples_free | targets.{target}.free_samples | Accepted training samples that a round could take now.
samples_waiting | targets.{target}.waiting_samples.{reason} \
| Accepted training samples that no round could take now, by reason.
samples_needed | targets.{target}.min_samples | Free samples that start a round.
samples_held_out | targets.{target}.held_out | Accepted samples that are never trained on.
prompts | prompts.tasks | Tasks that were not withdrawn.
prompts_exact | prompts.exact | Those of them whose prompt is exactly what the model was sent.
prompts_inexact | prompts.inexact.{reason} | The others by reason; one may have several.
tasks_left_out | left_out.{reason} | Tasks that rounds leave out, by reason; one may have several.
source_condition | sources.{source}.state.{condition} | The condition that a source is in; 1.
source_noted_timestamp_seconds | sources.{source}.read_at | When something about reading a source last changed.
source_longest_read_seconds | sources.{source}.seconds | The longest read transaction on a source, in seconds.
source_open_traces | sources.{source}.open_traces | Traces that are waited for.
source_restarts | sources.{source}.restarts \
| How often reading started over: the file was replaced, restored or migrated, or a line of it retried.
source_replies | sources.{source}.replies | Replies of a source in the ledger.
source_tasks | sources.{source}.tasks | Replies of a source that became tasks.
source_skipped | sources.{source}.skipped.{reason} | Replies of a source that became no task.
source_dead | sources.{source}.dead | Rows of a source that could not be understood.
source_private_traces | sources.{source}.private_traces \
| Traces of which nothing was stored when they were received.
stage_failing | failing.{stage} | Whether a stage of the daemon fails.
stage_last_ok_timestamp_seconds | stages.{stage}.last_ok | When the work of a stage last succeeded.
judge_failing | judge_failing | Whether judging is stopped by an error.
judge_calls_total | judge.by_purpose.{purpose}.calls | Calls of the judge by purpose.
judge_tokens_total | judge_tokens.{purpose}.{kind} | Tokens of those calls by kind.
judge_cost | judge_costs.{purpose}.{currency} | What those tokens cost by judge.prices at the time of the calls.
judge_tokens_today | judge.tokens_today | Tokens, sent and received, since midnight UTC.
recent_rejections | recent_verdicts.rejected_by.{criterion} \
| The newest verdicts that did not accept, by the criterion that was not met.
rounds | rounds_by_state.{state} | Training rounds by state.
gate_decisions_total | gate_decisions.{decision} \
| Comparisons of a candidate with the deployed adapter, by the decision.
gate_gain | gain.{bound} | The gain that the newest comparison found, and the bounds of its interval.
swaps_total | targets.{target}.swaps.{outcome} | Swaps of the alias, by outcome.
active_adapter | aliases.{alias}.serves.{adapter} | What an alias points at (empty: the base model); 1.
active_adapter_since_timestamp_seconds | aliases.{alias}.since | When the alias was pointed at it.
watch_conversations | aliases.{alias}.conversations.{version}.{outcome} \
| Conversations of a promotion that is watched, by version and outcome.
watch_e_value | aliases.{alias}.e_values.{test} \
| The e-value of each test whether the new version is worse: rolled back at 25 (outcomes) or 100 (missing).
adapter_acceptance_ratio | by_adapter.{adapter} | Accepted of an adapter's judged answers, 0 to 1.
live_round_phase | live.phase.{round}.{phase} | What the worker of the running round does; 1.
live_round_step | live.step | Steps of the running round that are done.
live_round_steps | live.steps | Steps that the running round has.
live_round_reward | live.reward | Mean reward of the last step that is done.
live_round_rollouts | live.rollouts | Rollouts of the step under way, or of the comparison, that are done.
live_round_rollouts_planned | live.rollouts_planned | Rollouts of the step under way, or of the comparison.
live_round_tokens_per_second | live.tokens_per_second | Tokens that the rollout engines generate in a second.
live_round_left_seconds | live.seconds_left | About how long the running round still takes.
live_round_paused | live.is_paused | Whether the running round waits for something.
live_round_reward_std | measured.reward_std | Standard deviation of the rewards, of the last step.
live_round_loss | measured.loss | Loss, of the last step.
live_round_grad_norm | measured.grad_norm | Norm of the gradient, of the last step.
live_round_entropy | measured.entropy | Mean entropy of the trained tokens, in nats, of the last step.
live_round_kl | measured.kl \
| Divergence from the policy that the round starts from, in nats a token (training.beta above 0), of the last step.
live_round_logprob_gap | measured.logprob_gap \
| Mean difference of trainer and engine log-probabilities, of the last step.
live_round_completion_tokens_mean | measured.completion_tokens_mean \
| Mean length of the rollouts in tokens, of the last step.
live_round_truncated_share | measured.truncated_share \
| Share of rollouts that reached their maximum length, of the last step.
replica_condition | replicas.{replica}.state.{condition} | The condition that an inference server is in; 1.
replica_serves | serving.{replica}.{model} | The model that the alias stands for there; 1.
replica_looked_timestamp_seconds | replicas.{replica}.looked_at | When a server was last looked at.
call_log_condition | logs.{replica}.condition.{condition} | The condition of a server's call log; 1.
calls_pulled_total | logs.{replica}.calls | Recorded calls that were pulled from a server.
calls_missed_total | logs.{replica}.missed | Recorded calls that a server had pruned before they were pulled.
calls_dropped_total | logs.{replica}.dropped | Calls that a server could not record.
calls_refused_total | logs.{replica}.refused | Calls that a server was not to record.
calls_to_erase | logs.{replica}.to_erase | Recorded calls that are to be erased on a server still.
"""
"""Name, path in the facts and help of each metric; names that end with `_total` are counters. A part of a path in
braces is a label, whose values are the keys there; a text there is the only one, with 1. Other texts are times."""
WITHOUT_TARGETS: Final = "{target}", ""


def exposition(facts: Facts) -> bytes:
    """The metrics of a status and of this process, in UTF-8.

    Samples have no timestamps: the textfile collector refuses them.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(facts))
    return generate_latest(registry)


class _Metrics(Collector):
    def __init__(self, facts: Facts) -> None:
        self._facts = _by_label(facts)

    def collect(self) -> Iterator[Metric]:
        for line in METRICS.strip().splitlines():
            name, path, text = line.split(" | ")
            steps = path.split(".")
            labels = [step[1:-1] for step in steps if step[0] == "{"]
            if "" in self._facts["targets"] and "target" in labels:
                labels.remove("target")
            family = Counter if name.endswith("_total") else Gauge
            metric = family(f"flywheel_{name}", text, labels=labels)
            for values, value in _found(self._facts, steps):
                metric.add_metric(values, value)
            yield metric
        yield from CALL_SECONDS.collect()


def _found(facts: Any, steps: list[str]) -> Iterator[tuple[list[str], float]]:
    """The values at a path, each with those of its labels."""
    if facts in (None, ""):
        return
    if not steps:
        yield [], datetime.fromisoformat(facts).timestamp() if isinstance(facts, str) else float(facts)
        return
    step, *rest = steps
    if step[0] != "{":
        yield from _found(facts.get(step), rest)
        return
    for key, value in ({facts: 1} if isinstance(facts, str) else facts).items():
        for values, number in _found(value, rest):
            yield ([] if (step, key) == WITHOUT_TARGETS else [key]) + values, number


def _by_label(facts: Facts) -> Facts:
    """The facts as paths name them: lists by the names of their entries, and what follows from the facts."""
    told, replicas = as_json(facts), servers(facts)
    live = told["live_round"] or {}
    progress = live.get("progress")
    usage = told["judge"]["by_purpose"].items()
    failing = {name: bool(each["failing_since"]) for name, each in told["stages"].items()}
    compared: Facts = next((each["comparison"] for each in told["rounds"] if each["comparison"]), {})
    aliases: Facts = {}
    serving: dict[str, dict[str, int]] = {}
    for own in facts["targets"].values():
        deployed, watch = own["deployment"], own["watch"]
        aliases[deployed["alias"]] = {
            "serves": {deployed["adapter"] or "": 1},
            "since": deployed["since"],
            **(_watched(watch["figures"]) if watch is not None else {}),
        }
        for each in own["replicas"]:
            serving.setdefault(each["url"], {}).update({each["serves"]: 1} if each["serves"] else {})
    return told | {
        "daemon_up": told["daemon"]["pid"] is not None,
        "targets": facts["targets"],
        "left_out": {each["reason"]: each["tasks"] for each in told["left_out"]},
        "sources": {each["path"]: each | _source(each) for each in told["sources"]},
        "failing": failing,
        "judge_failing": failing.get(notices.JUDGE, False),
        "judge_tokens": {
            name: {kind: used[f"{kind}_tokens"] for kind in ("prompt", "completion")} for name, used in usage
        },
        "judge_costs": {name: {cost["currency"]: cost["amount"]} for name, used in usage if (cost := used["cost"])},
        "gain": {bound: compared[bound] for bound in ("gain", "lower", "upper") if compared},
        "aliases": aliases,
        "by_adapter": {each["adapter"]: each["acceptance"] for each in told["by_adapter"]},
        "live": progress
        and progress | {"phase": {live["round"]: progress["phase"]}, "is_paused": bool(progress["paused"])},
        "measured": live.get("measured") or {},
        "replicas": {each["url"]: each | {"state": each["condition"] or "not looked at yet"} for each in replicas},
        "serving": serving,
        "logs": {each["url"]: each["calls"] for each in replicas if each["calls"]["condition"]},
    }


def _source(source: Facts) -> Facts:
    """One that is no longer configured has no condition."""
    condition = source["condition"] or "not read yet"
    return {
        "state": condition if source["configured"] else None,
        "seconds": round(source["longest_read_ms"] / 1000, 6),
    }


def _watched(figures: WatchFigures) -> Facts:
    outcomes = ("successes", "failures", "missing", "waiting")
    return {
        "conversations": {
            arm.version: {outcome: getattr(arm, outcome) for outcome in outcomes}
            for arm in (figures.old, figures.new)
        },
        "e_values": {"outcomes": figures.e_value, "missing": figures.e_value_missing},
    }
