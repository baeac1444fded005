"""Rollouts: what the policy did with a prompt, how its calls were answered, its reward, statistics of a batch.

Plain data and arithmetic; nothing here generates, grades or trains.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, get_args

from flywheel.errors import TrainError
from flywheel.records.program_run import ENGINE_FAULTS, RunResult
from flywheel.records.tool_calls import ToolResult
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import Exchange, Verdict, is_within_share
from flywheel.training.data.groups import MIN_REWARDS, Drop, Scale, dropped_groups, group_advantages
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.samples import Sample, TrainingRow


class CallOutcome(StrEnum):
    """How a call was answered."""

    TRACE = "trace"
    SHARED = "shared"
    MISS = "miss"
    UNKNOWN_TOOL = "unknown tool"
    UNPARSEABLE = "unparseable arguments"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call of a rollout.

    Attributes:
        call_id: The rollout's own id of it.
        result: What the policy was answered; None after a miss that ends the rollout, and for a finish tool.
        repeats_trace: Whether tool and arguments equal those of a call in the task's own trace.
    """

    call_id: str
    name: str
    outcome: CallOutcome
    result: ToolResult | None = None
    repeats_trace: bool = False

    @property
    def is_hit(self) -> bool:
        """Whether a recorded result answers it."""
        return self.outcome in (CallOutcome.TRACE, CallOutcome.SHARED)

    @property
    def is_miss(self) -> bool:
        return self.outcome is CallOutcome.MISS


def tool_metrics(rollouts: Sequence[Sequence[AnsweredCall]]) -> dict[str, Any]:
    """The figures of rollouts, given the calls of each. A share is None where it would be one of nothing.

    - `call_share`: rollouts with a call, finish tools aside. `miss_share`: rollouts with a miss.
    - `hit_rate`, `hit_rate_by_tool`: well-formed calls of offered tools that a recorded result answers.
    - `argument_accuracy`: calls of offered tools that equal a call of the task's own trace.
    - `tool_calls`: number of calls by outcome.
    """
    outcomes: Counter[CallOutcome] = Counter()
    hits: Counter[str] = Counter()
    lookups: Counter[str] = Counter()
    repeating = 0
    for call in (call for calls in rollouts for call in calls):
        outcomes[call.outcome] += 1
        repeating += call.repeats_trace
        hits[call.name] += call.is_hit
        lookups[call.name] += call.is_hit or call.is_miss
    calling = [any(call.outcome is not CallOutcome.FINISH for call in calls) for calls in rollouts]
    missing = [any(call.is_miss for call in calls) for calls in rollouts]
    return {
        "call_share": _share(sum(calling), len(rollouts)),
        "miss_share": _share(sum(missing), len(rollouts)),
        "hit_rate": _share(hits.total(), lookups.total()),
        "hit_rate_by_tool": {name: hits[name] / count for name, count in sorted(lookups.items()) if count},
        "argument_accuracy": _share(repeating, lookups.total() + outcomes[CallOutcome.UNPARSEABLE]),
        "tool_calls": {outcome.value: outcomes[outcome] for outcome in CallOutcome},
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter for the engines. Name and number always identify the same weights, and so does `weights`, the
    SHA-256 of their file, in other processes as well."""

    name: str
    number: int
    weights: str = ""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request to an engine. `group` is the prompt's index in its step; `adapter` None is the base model.

    A training rollout is sampled at `temperature` from the policy itself, with at most `max_tokens`, and
    `max_turn_tokens` in each message. A rollout
    `as_served` uses the server's defaults and limits, also its temperature if `temperature` is None, and is cut after
    `seconds`.
    """

    prompt: Prompt
    group: int
    seed: int
    temperature: float | None
    max_tokens: int | None
    adapter: LoadedAdapter | None
    as_served: bool = False
    seconds: float | None = None
    max_turn_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine made of a request: one message, or a trajectory of several with the tools' answers.

    Attributes:
        text: The final answer, as the server would return it to an agent.
        samples: The tokens, prompts included; each generated token is in the loss mask of exactly one sample. The
            logprobs are those under the sampling distribution.
        texts: The text of each token of each sample; None where it is unknown.
        steps: The messages between question and answer.
        calls: The tool calls, and how they were answered.
        missed: Whether it ended because a call has no recorded result. There is an `error` then, too.
        turns: Number of messages that the policy generated.
        forks: Number of turns whose prompts do not continue an earlier one.
        truncated: Whether it reached a limit of tokens, turns or time.
        loop: What a message repeats that was cut off at its limit of tokens, in words; empty if none does.
        error: Why there is nothing to grade; empty if there is.
        run: What the user's agent returned, if it is one.
        cause: Why the user's agent failed, in a word: a `FailureCause`, a `CallFault`, or `no_calls`. There is an
            `error` then, too.
        system_prompts: Those with which the user's agent called the policy.
    """

    text: str = ""
    samples: tuple[Sample, ...] = ()
    texts: tuple[tuple[str | None, ...], ...] = ()
    steps: tuple[ChatMessage, ...] = ()
    calls: tuple[AnsweredCall, ...] = ()
    missed: bool = False
    turns: int = 1
    forks: int = 0
    truncated: bool = False
    loop: str = ""
    error: str = ""
    run: RunResult | None = None
    cause: str = ""
    system_prompts: tuple[str, ...] = ()

    @property
    def needs_reward(self) -> bool:
        """False if it ended by a miss, or because the user's agent failed, and not the engine."""
        return not self.missed and (not self.cause or self.cause in ENGINE_FAULTS)

    @property
    def has_called(self) -> bool:
        """Whether it called a tool other than those that end it."""
        return any(call.outcome is not CallOutcome.FINISH for call in self.calls)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, including those that end turns."""
        return tuple(token for token, _ in self._generated())

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """The logprobs of the generated tokens; None where the engine returned none."""
        return tuple(logprob for _, logprob in self._generated())

    def _generated(self) -> Iterator[tuple[int, float | None]]:
        for sample in self.samples:
            for token, own, logprob in zip(sample.token_ids, sample.loss_mask, sample.logprobs, strict=True):
                if own:
                    yield token, logprob


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """What the rubric's score and the reward of the user's agent weigh in the reward of a rollout; the most that one
    with a loop gets (`rollout.loop_reward`); and the range of the agent's own (`rollout.reward.range`)."""

    rubric: float = 1.0
    program: float = 0.0
    loop: float | None = 0.0
    range: float = 1.0

    def mean(self, score: float | None, own: float | None) -> float | None:
        """The weighted mean; None if a part with a weight is missing."""
        parts = [(weight, value) for weight, value in ((self.rubric, score), (self.program, own)) if weight]
        known = [(weight, value) for weight, value in parts if value is not None]
        if len(known) < len(parts):
            return None
        return math.fsum(weight * value for weight, value in known) / math.fsum(weight for weight, _ in known)


@dataclass(frozen=True, slots=True)
class Rollout:
    """`weights` are for rollouts of the user's agent. Without a weight of the rubric there is no verdict."""

    request: RolloutRequest
    completion: Completion
    verdict: Verdict | None
    weights: RewardWeights = RewardWeights()

    @property
    def reward(self) -> float | None:
        """The reward: the verdict's score, or of the user's agent the weighted mean of score and own reward. None
        when the judge, the engine or the agent failed. A loop needs nobody who rewards it."""
        found, run = None if self.verdict is None else self.verdict.score, self.completion.run
        if run is not None:
            found = None if self.completion.error else self.weights.mean(found, run.reward)
        if not self.completion.loop or (most := self.weights.loop) is None:
            return found
        return most if found is None else min(found, most)

    @property
    def missed(self) -> bool | None:
        """Whether it ended by a miss; None if it failed for another reason."""
        if self.completion.missed:
            return True
        return None if self.completion.error else False

    @property
    def system_prompts(self) -> tuple[str, ...]:
        """The different ones that the policy got; an empty one if there was none."""
        task = self.request.prompt.task
        found = self.completion.system_prompts if task.agent == "program" else system_prompts_of(task.prompt)
        return tuple(dict.fromkeys(found)) or ("",)

    @property
    def values(self) -> dict[str, float]:
        """The value of each evaluated criterion."""
        if self.verdict is None or self.reward is None:
            return {}
        return {result.criterion: result.value for result in self.verdict.results}

    @property
    def failure(self) -> str:
        """Why there is no reward; empty when there is one."""
        if self.completion.error:
            return self.completion.error
        return self.verdict.error or "the judge gave no score" if self.verdict and self.reward is None else ""


def system_prompts_of(messages: Iterable[Any]) -> Iterator[str]:
    """Of messages in the OpenAI chat format."""
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
            yield text_of(message.get("content"))


def text_of(content: Any) -> str:
    """The text of a message's content, of which other parts are left out."""
    if isinstance(content, list):
        parts = [each.get("text") if isinstance(each, Mapping) else each for each in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def exchange(prompt: Prompt, completion: Completion) -> Exchange:
    """What the judge sees of a rollout."""
    return replace(prompt.task.exchange, answer=completion.text, trajectory=completion.steps)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The rollouts of one step in the order of their requests.

    Attributes:
        seconds: The duration of each part.
        most_groups: How many groups are trained on at most; None for all that have a signal.
        generated_at: When (`time.monotonic`) the engines were done with them; None for stored ones.
        lost: Number of rollouts that were begun again because their engine was lost.
    """

    rollouts: tuple[Rollout, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    most_groups: int | None = None
    generated_at: float | None = None
    lost: int = 0

    @property
    def rewards(self) -> list[float]:
        return [reward for rollout in self.rollouts if (reward := rollout.reward) is not None]

    @property
    def missed(self) -> int:
        """Number of rollouts that ended by a miss."""
        return sum(rollout.completion.missed for rollout in self.rollouts)

    @property
    def failed(self) -> Counter[str]:
        """Number of rollouts in which the user's agent failed, or the engine that it asked, by cause."""
        return Counter(rollout.completion.cause for rollout in self.rollouts if rollout.completion.cause)

    @property
    def system_prompts(self) -> Counter[str]:
        """Number of rollouts by system prompt; one with several counts for each."""
        return Counter(text for rollout in self.rollouts for text in rollout.system_prompts)

    @property
    def undecided(self) -> int:
        """Number of rollouts that should have a reward and have none."""
        return len(self._undecided)

    @property
    def _undecided(self) -> list[Rollout]:
        return [each for each in self.rollouts if each.reward is None and each.completion.needs_reward]

    @property
    def groups(self) -> int:
        return len({rollout.request.group for rollout in self.rollouts})

    @property
    def reward_range(self) -> float:
        """The one that rewards are expected to have. That of scores is 1."""
        weights = self.rollouts[0].weights if self.rollouts else RewardWeights()
        return weights.mean(1.0, weights.range) or 1.0

    @property
    def rewards_of_groups(self) -> dict[int, list[float]]:
        """Those of each group that has any."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for rollout in self.rollouts:
            if (reward := rollout.reward) is not None:
                found[rollout.request.group].append(reward)
        return dict(found)

    @property
    def dropped(self) -> dict[int, Drop]:
        """The groups that are not trained on, and why."""
        rollouts = self.rollouts
        groups, rewards = [each.request.group for each in rollouts], [each.reward for each in rollouts]
        missed = [each.missed for each in rollouts]
        return dropped_groups(groups, rewards, missed, self.most_groups, self.reward_range)

    @property
    def without_spread(self) -> list[int]:
        """The groups that are dropped because their rewards do not differ."""
        return [group for group, why in self.dropped.items() if why == "spread"]

    def advantages(self, scale: Scale = "group") -> list[float | None]:
        """One for each rollout; None for those that are not trained on (`group_advantages`)."""
        groups = [rollout.request.group for rollout in self.rollouts]
        left_out = {group for group, why in self.dropped.items() if why in ("misses", "surplus")}
        rewards = [None if each.request.group in left_out else each.reward for each in self.rollouts]
        return group_advantages(groups, rewards, scale, self.reward_range)

    def rows(self, scale: Scale = "group", *, mask_truncated: bool = False) -> list[TrainingRow]:
        """The samples to train on, without those that have no trained token. `mask_truncated` leaves out truncated
        rollouts, whose rewards still count in their groups."""
        return [
            TrainingRow(number, sample, advantage)
            for number, (rollout, advantage) in enumerate(zip(self.rollouts, self.advantages(scale), strict=True))
            if advantage is not None and not (mask_truncated and rollout.completion.truncated)
            for sample in rollout.completion.samples
            if sample.trained
        ]

    @property
    def groups_with_spread(self) -> int:
        """Number of groups that can be trained on: with few misses, and enough rewards, which differ."""
        return self.groups - sum(why != "surplus" for why in self.dropped.values())

    def refuse_undecided(self, max_share: float, of: str = "the rollouts of a step") -> None:
        """Raise TrainError when too many rewards are missing for a meaningful step, or comparison.

        Rollouts that ended by a miss need no reward, and a few others prove no failure of the judge. The same for
        those in which the user's agent failed, see `refuse_failed`.
        """
        undecided = self._undecided
        graded = sum(rollout.completion.needs_reward for rollout in self.rollouts)
        if is_within_share(len(undecided), graded, max_share) or (
            graded < len(self.rollouts) and graded < MIN_REWARDS
        ):
            return
        raise TrainError(
            f"reward {of}",
            f"{len(undecided)} of {graded} are undecided, more than the share {max_share:g} allowed by"
            f" training.max_undecided_share; {_most_frequent_failure(undecided)}",
            "Check the judge's endpoint and the worker's log; the round can be started again.",
            retryable=True,
        )

    def refuse_failed(self, max_share: float) -> None:
        """Raise TrainError when the user's agent failed in a larger share of the rollouts."""
        failed = [each for each in self.rollouts if each.completion.cause and not each.completion.needs_reward]
        if is_within_share(len(failed), len(self.rollouts), max_share):
            return
        raise TrainError(
            "run the agent (rollout.agent)",
            f"it failed in {len(failed)} of {len(self.rollouts)} rollouts, more than the share {max_share:g} allowed"
            f" by training.max_undecided_share; {_most_frequent_failure(failed)}",
            "`flywheel workflow check` runs it once. Its output is in the worker's log.",
            retryable=True,
        )

    def summary(self) -> dict[str, Any]:
        """The step's figures for its metrics line. Means are over existing values; None if there are none.

        `tools` has the figures of rollouts that can call recorded tools (`tool_metrics`), `program` those of rollouts
        of the user's agent.
        """
        done = [rollout.completion for rollout in self.rollouts if not rollout.completion.error]
        ended = [rollout for rollout in self.rollouts if rollout.missed is not None]
        recorded = [each.completion for each in ended if each.request.prompt.task.agent == "recorded"]
        dropped = Counter(self.dropped.values())
        rewards = self.rewards
        return {
            "reward_mean": mean(rewards),
            "reward_std": deviation(rewards),
            "undecided": self.undecided,
            "missed": self.missed,
            "groups": self.groups,
            "groups_with_spread": self.groups_with_spread,
            "groups_dropped": {why: dropped[why] for why in get_args(Drop)},
            "rollouts": len(self.rollouts),
            "rollouts_lost": self.lost,
            "completion_tokens_mean": mean([len(completion.token_ids) for completion in done]),
            "truncated_share": mean([float(completion.truncated) for completion in done]),
            "looped": sum(bool(rollout.completion.loop) for rollout in self.rollouts),
            "turns_mean": mean([each.completion.turns for each in ended]),
            "forks": sum(each.completion.forks for each in ended),
            **({"tools": tool_metrics([completion.calls for completion in recorded])} if recorded else {}),
            **self._of_programs(),
        }

    def _of_programs(self) -> dict[str, Any]:
        programs = [each.completion for each in self.rollouts if each.request.prompt.task.agent == "program"]
        if not programs:
            return {}
        ended = [each.run for each in programs if each.run is not None and not each.cause]
        late = Counter(late_call=sum(each.run.late_calls for each in programs if each.run is not None))
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        for run in ended:
            for name, value in run.metrics.items():
                metrics[name].append(value)
        return {
            "program": {
                "failures": dict((self.failed + late).most_common()),
                "reward_mean": mean([run.reward for run in ended if run.reward is not None]),
                "metrics": {name: mean(values) for name, values in sorted(metrics.items())},
                "seconds_mean": mean([run.seconds for run in ended]),
            }
        }

    def usage(self) -> dict[str, int]:
        verdicts = [rollout.verdict for rollout in self.rollouts if rollout.verdict is not None]
        return {
            "rollouts": len(self.rollouts),
            "rollout_tokens": sum(len(rollout.completion.token_ids) for rollout in self.rollouts),
            "judge_calls": sum(verdict.calls for verdict in verdicts),
            "judge_prompt_tokens": sum(verdict.prompt_tokens for verdict in verdicts),
            "judge_completion_tokens": sum(verdict.completion_tokens for verdict in verdicts),
        }


def _most_frequent_failure(rollouts: Iterable[Rollout]) -> str:
    reason, times = Counter(rollout.failure for rollout in rollouts).most_common(1)[0]
    return f"{times} times: {reason}"


def add_usage(total: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {key: total.get(key, 0) + more.get(key, 0) for key in {**total, **more}}


def mean(values: Sequence[float]) -> float | None:
    try:
        return math.fsum(values) / len(values) if values else None
    except OverflowError:
        # Metrics of the user's agent may be any finite numbers.
        return math.fsum(value / len(values) for value in values)


def deviation(values: Sequence[float]) -> float | None:
    """Population standard deviation."""
    return statistics.pstdev(values) if values else None
