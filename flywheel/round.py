"""A training round as it is written down: what the worker is told, and what it answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flywheel.trace import ChatMessage

SPEC_FILE = "spec.json"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
RESULT_FILE = "result.json"
ERROR_FILE = "error.json"
ADAPTER_DIR = "adapter"
LOG_FILE = "worker.log"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RoundTask(Frozen):
    """A task as training and evaluation need it. `prompt` is in the OpenAI chat form, `answer` the traced one if it
    was accepted, `reference` the right one where the task knows it; `output_tokens` is what the traced reply took.
    Tasks of one `conversation` are no independent evidence. `prompt_tokens` are what the prompt had when the model
    was asked, 0 where that is not known or not to be compared."""

    task_id: str
    query: str
    answer: str
    prompt: list[ChatMessage]
    tools: list[dict[str, Any]] = []
    reference: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    conversation: str = ""


class GateTest(Frozen):
    """Which test of the gate a round is: its number in an epoch, and the one-sided level that this leaves it."""

    epoch: int
    number: int
    alpha: float


class SpentTest(Frozen):
    """A test of which the rewards were seen.

    `spread` is what one conversation contributes to the gain's standard error, see `Comparison`; `samples` are the
    answers per task and side. Both are None where they are not known.
    """

    epoch: int
    number: int
    conversations: int
    spread: float | None
    samples: int | None


class AdapterRef(Frozen):
    """An adapter by name (`r0007`), directory and tree hash."""

    name: str
    path: str
    sha256: str


class RoundSpec(Frozen):
    """Everything a worker needs; `settings` is the whole configuration and never holds a secret. A debug round has no
    `test`."""

    round_id: str
    attempt: int
    seed: int
    debug: bool
    base_model: str
    parent: AdapterRef | None
    train: list[RoundTask]
    held_out: list[RoundTask]
    rubric: dict[str, Any]
    settings: dict[str, Any]
    test: GateTest | None = None


class Score(Frozen):
    """Rewards of one held-out task: `candidate` and `deployed` hold the mean over the same seeds, in 0…1."""

    task_id: str
    candidate: float
    deployed: float


class CriterionComparison(Frozen):
    """One criterion on the same answers: its value in 0…1, turned where it takes away, so that more is better.

    `tasks` are those where it was looked at on both sides: a failed required check leaves the judge unasked.
    """

    criterion: str
    tasks: int
    candidate_mean: float
    deployed_mean: float
    gain: float
    lower: float
    upper: float


class Comparison(Frozen):
    """Candidate against deployed on the same held-out tasks.

    `gain` is the mean of the paired differences over tasks, `lower` and `upper` bound its confidence interval at
    `confidence`; `spread` is the gain's standard error times the root of the number of conversations. Criteria are in
    the order of the rubric.
    """

    tasks: int
    conversations: int = 0
    samples: int
    undecided: int
    candidate_mean: float
    deployed_mean: float
    gain: float
    lower: float
    upper: float
    confidence: float
    method: str
    spread: float | None = None
    scores: list[Score]
    criteria: list[CriterionComparison] = []


class Probe(Frozen):
    """What proves that a server answers with an adapter: the log-probabilities of given tokens under it, under its
    parent (None: it has none, or an older round did not measure that) and under the base model.

    All lists of log-probabilities belong to `token_ids` (the continuation of `prompt_token_ids`) and have its length.
    `places` are the tokens that are compared (empty: all), and `noise` how far two measurements of the adapter lie
    apart there, in nats per token.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    adapter_logprobs: list[float]
    base_logprobs: list[float]
    parent_logprobs: list[float] | None = None
    places: list[int] = []
    noise: float = 0.0

    @property
    def compared(self) -> list[int]:
        """The places in `token_ids` that are compared."""
        return self.places or list(range(len(self.token_ids)))


class RoundResult(Frozen):
    """The worker's last word, written atomically. `adapter` is absent after a debug run or a refusal; `left_out` says
    of tasks that were to be trained on, by their ids, why they were not."""

    round_id: str
    outcome: Literal["trained", "refused", "debug"]
    reason: str = ""
    adapter: AdapterRef | None = None
    comparison: Comparison | None = None
    probe: Probe | None = None
    left_out: dict[str, str] = {}
    inexact: dict[str, str] = {}
    """Of tasks for training or gate whose prompt is not as long as what the model was sent, what was found."""
    steps: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    seconds: dict[str, float] = {}
    usage: dict[str, int] = {}
    versions: dict[str, str] = {}
    device: str = ""
