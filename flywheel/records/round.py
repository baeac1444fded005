"""The files of a training round: the specification that the worker reads, and the result that it writes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from flywheel.records.selection import Candidate as SampleCandidate
from flywheel.records.selection import SelectionRules
from flywheel.records.tool_calls import SharedRecordings
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import Exchange
from flywheel.system.terminal import quantity

SPEC_FILE = "spec.json"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_DIR = "rollouts"
"""A file per step."""
OLD_ROLLOUTS_FILE = "rollouts.jsonl"
"""Of a round of an earlier version: those of all steps."""
EVALUATION_FILE = "evaluation.jsonl"
ANSWERS_FILE = "answers.jsonl"
RESULT_FILE = "result.json"
SELECTION_FILE = "selection.jsonl"
ERROR_FILE = "error.json"
ADAPTER_DIR = "adapter"
CANDIDATE_DIR = "candidate"
CANDIDATE_FILE = "candidate.json"
LOG_FILE = "worker.log"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class RoundTask(Frozen):
    """A task for training or evaluation."""

    task_id: str
    exchange: Exchange
    """What the judge gets of a rollout, without the rollout's answer and steps. Its reference is the traced answer if
    that was accepted, else empty; its line has the right answer and the ground truth, if the task has them."""
    prompt: list[ChatMessage]
    """In the OpenAI chat format. Unlike the history of `exchange`, it may have messages behind the question."""
    prompt_tokens: int = 0
    """Tokens of the traced prompt, 0 if unknown or not comparable."""
    output_tokens: int = 0
    """Tokens of the traced reply."""
    conversation: str = ""
    """Tasks of one conversation are not independent of each other."""
    agent: Literal["reply", "recorded", "program"] = "reply"
    """Who acts in a rollout: `reply` is one message, `recorded` a loop of the model and recorded tools, `program` the
    user's own agent."""
    reply: tuple[ChatMessage, ...] = ()
    """An accepted reply to imitate: the model's messages with the results of its tools. Empty without one, or if no
    stage of the round trains on recorded replies."""
    rejected: tuple[ChatMessage, ...] = ()
    """A worse reply to the same prompt, to compare `reply` with. Empty without one."""
    reply_task_id: str = ""
    """The task whose reply `reply` is in a pair; empty if it is this one's."""
    rejected_task_id: str = ""
    """The task whose reply `rejected` is; empty if it is this one's."""
    is_of_teacher: bool = False
    """Whether that reply is of another model (`sources[].models.teachers`)."""
    line: dict[str, Any] = {}
    """For a `program`: the whole line of the task, as in the task file."""
    steps: tuple[ChatMessage, ...] = ()
    """The messages between question and traced answer, from which tools are answered."""
    errors: tuple[str, ...] = ()
    """The steps that failed, as in `metadata.errors_json`."""
    sends_reasoning: bool = False
    """Whether the agent sends the model's reasoning again with later calls."""
    suite: str = ""
    """The suite whose task it is; empty for tasks of the round itself."""

    @property
    def beginning(self) -> str:
        """The first user message of its conversation; the question, where the prompt has none. Its id without any
        text."""
        found = (message.get("content") for message in self.prompt if message.get("role") == "user")
        return str(next(found, None) or self.exchange.query or self.task_id)

    @property
    def has_pair(self) -> bool:
        """Whether it has a better and a worse recorded reply."""
        return bool(self.reply and self.rejected)


class Suite(Frozen):
    """A fixed set of tasks that candidate and deployed adapter also answer; none of them is trained on."""

    name: str
    tasks: list[RoundTask]
    """Their ids begin with the suite's name and a slash."""
    rubric: dict[str, Any]
    margin: float | None
    """The largest acceptable loss; None if the suite is only reported."""


class GateTest(Frozen):
    """The gate's test of a round."""

    epoch: int
    number: int
    """Its number in the epoch."""
    alpha: float
    """Its one-sided level."""


class SpentTest(Frozen):
    """A test whose rewards were seen."""

    epoch: int
    number: int
    conversations: int
    spread: float | None
    """See `Comparison`; None if unknown."""
    samples: int | None
    """Answers per task and adapter; None if unknown."""


class AdapterRef(Frozen):
    """An adapter by name (`r0007`), directory and tree hash."""

    name: str
    path: str
    sha256: str


class Candidate(AdapterRef):
    """An adapter that another trainer made: a copy in the round's directory."""

    source: str
    """The folder that it was copied from."""
    base: str
    """What is known of the base model that it was trained on."""
    exposure: str
    """What is known of the held-out conversations that it was trained on."""
    trained_on: str = ""
    """The data that says so; empty without any."""

    @property
    def summary(self) -> str:
        """Where it comes from, in one line."""
        return "; ".join(filter(None, (f"an adapter of another trainer, {self.source}", self.base, self.exposure)))


class FrozenTarget(Frozen):
    """A target that a round of another one does not train: its agent answers as it is deployed."""

    target: str
    alias: str
    adapter: AdapterRef | None
    """None: the base model."""


class ClassShare(Frozen):
    """The tasks of a class among the new ones of a round."""

    weight: float
    wanted: int
    """What its weight asks for, of the new tasks of all classes."""
    available: int
    chosen: int


class RoundSelection(Frozen):
    """How the samples of a round were chosen."""

    seed: int
    order: str
    """The order in which the candidates were gone through."""
    candidates: int
    """Samples that were free."""
    chosen: int
    """New ones: without those that are replayed."""
    replayed: int = 0
    """Tasks of earlier promoted rounds."""
    replayable: int = 0
    """Those among which they were drawn."""
    classes: dict[str, ClassShare] = {}
    """By class, if classes have weights."""
    widened: dict[str, float] = {}
    """Shares of one conversation, user or template (0…1) that had to be raised."""
    left_out: dict[str, int] = {}
    """The other candidates, by reason."""

    @property
    def sentences(self) -> list[str]:
        """What was chosen, and why, for people."""
        said = [f"{self.chosen:,} of {quantity(self.candidates, 'free sample')}: {self.order}"]
        if self.replayable:
            of = f"{quantity(self.replayable, 'task')} of earlier promoted rounds"
            said.append(f"{self.replayed:,} of {of}, drawn at random")
        for name, share in self.classes.items():
            few = f", {share.wanted - share.chosen:,} too few" if share.chosen < share.wanted else ""
            said.append(f"{name}: {share.chosen:,} of {share.available:,}, {share.wanted:,} by its weight{few}")
        said += [f"one {name} may be {share:.0%} of it" for name, share in self.widened.items()]
        return [*said, *(f"left out {number:,}: {why}" for why, number in self.left_out.items())]


class SamplePool(Frozen):
    """Candidates of which the worker chooses by their loss; it releases the others."""

    size: int
    strategy: Literal["loss_topk", "hybrid"]
    candidates: dict[str, SampleCandidate]
    """By task id."""
    rules: SelectionRules


class RoundSpec(Frozen):
    """Everything that a worker needs."""

    round_id: str
    attempt: int
    seed: int
    debug: bool
    base_model: str
    parent: AdapterRef | None
    target: str = ""
    """The target that is trained, with `settings.model.alias`; empty without `targets`."""
    frozen: list[FrozenTarget] = []
    """The other targets."""
    candidate: Candidate | None = None
    """An adapter to compare with the parent: the round trains nothing and has no tasks for it."""
    train: list[RoundTask]
    held_out: list[RoundTask]
    selection: RoundSelection | None = None
    """How `train` was chosen; None for a round on files, a debug round, and one that trains nothing."""
    pool: SamplePool | None = None
    """None if the round trains on all of `train`."""
    left_out: dict[str, str] = {}
    """Tasks of the round that are not trained on, by id, with the reason."""
    rubric: dict[str, Any]
    """Empty for a round on recorded replies alone, which grades nothing."""
    settings: dict[str, Any]
    """The whole configuration, without secrets."""
    evaluates: bool = False
    """Whether `parent` answers the held-out tasks, and nothing is trained or compared."""
    test: GateTest | None = None
    """None for a round that compares nothing: a debug round, or one on files without a rubric."""
    shared: SharedRecordings = SharedRecordings()
    """For training, of traces in the training split."""
    shared_gate: SharedRecordings = SharedRecordings()
    """For the gate, of all traces."""
    suites: list[Suite] = []
    """In the order of the settings; empty for a round that compares nothing."""

    @property
    def trains(self) -> bool:
        """Whether an adapter is trained."""
        return not self.debug and not self.evaluates and self.candidate is None


class Score(Frozen):
    """Rewards of one held-out task, 0…1: the mean of each adapter over the same seeds."""

    task_id: str
    candidate: float
    deployed: float


class CriterionComparison(Frozen):
    """The comparison by one criterion: its values in 0…1, inverted for a negative weight, so that more is better."""

    criterion: str
    tasks: int
    """Tasks with a value for both adapters: after a failed required check the judge is not called."""
    candidate_mean: float
    deployed_mean: float
    gain: float
    lower: float
    upper: float


class SuiteComparison(Frozen):
    """The comparison on the tasks of one suite, by its rubric's score."""

    name: str
    tasks: int
    """Tasks of which all answers of both adapters have a score."""
    conversations: int
    undecided: int
    """The other tasks."""
    candidate_mean: float
    deployed_mean: float
    gain: float
    lower: float
    upper: float


class Comparison(Frozen):
    """The candidate and the deployed adapter on the same held-out tasks."""

    tasks: int
    conversations: int = 0
    samples: int
    undecided: int
    candidate_mean: float
    deployed_mean: float
    gain: float
    """Mean of the paired differences over tasks."""
    lower: float
    """Lower bound of the gain's confidence interval, also if undecided answers are counted at their worst."""
    upper: float
    """Its upper bound."""
    confidence: float
    """Its level."""
    method: str
    """How it was computed."""
    spread: float | None = None
    """The gain's standard error times the square root of the number of conversations."""
    scores: list[Score]
    criteria: list[CriterionComparison] = []
    """In the order of the rubric."""
    suites: list[SuiteComparison] = []
    """In the order of the settings."""
    tripwires: list[CriterionComparison] = []
    """What was measured for the tripwires (`flywheel.training.gate.gate.TRIPWIRES`), in their order, so that more is
    better."""
    candidate_undecided: int = 0
    """Answers of the candidate without a score."""
    deployed_undecided: int = 0
    """Those of the deployed adapter. The lower bounds count both at their worst."""
    candidate_missed: int = 0
    """Answers of the candidate that ended by a miss: a call without a recorded result. They score 0."""
    deployed_missed: int = 0
    """Those of the deployed adapter. They score the mean of its other answers."""
    candidate_failed: int = 0
    """Answers of the candidate in which the user's agent failed. They score 0, or the least reward if that is
    below."""
    deployed_failed: int = 0
    """Those of the deployed adapter. They score the mean of its other answers."""
    lower_at_bound: float | None = None
    """The lower bound if misses and failures of the deployed adapter scored 1, or the highest reward if that is
    above; None if there are none."""


class DecisionReason(StrEnum):
    """What a decision of the gate rests on."""

    BETTER = "better"
    """the gain is shown: promoted"""
    FEW_TASKS = "few_tasks"
    """fewer tasks than `gate.min_tasks` are decided"""
    NOT_BETTER = "not_better"
    """the lower bound of the gain is not above `gate.min_gain`"""
    FEW_ON_CRITERION = "few_on_criterion"
    """a criterion with a margin was evaluated on fewer tasks than `gate.min_tasks`"""
    WORSE_ON_CRITERION = "worse_on_criterion"
    """a criterion is not shown to lose less than its margin"""
    FEW_ON_SUITE = "few_on_suite"
    """fewer tasks of a suite with a margin than `gate.min_tasks` are decided"""
    WORSE_ON_SUITE = "worse_on_suite"
    """the candidate is not shown to lose less than the margin on a suite"""
    HARMFUL = "harmful"
    """a tripwire shows harm that the mean score hides"""


class GateDecision(Frozen):
    """The gate's decision about a comparison, with the limits that it applied."""

    promote: bool
    reason: str
    reason_code: DecisionReason
    criterion: str = ""
    """The criterion that prevented a promotion."""
    suite: str = ""
    """The suite that prevented it."""
    tripwire: str = ""
    """The tripwire that prevented it."""
    min_tasks: int
    min_gain: float
    confidence: float
    """That of the intervals of single criteria and suites."""
    margins: dict[str, float] = {}
    """The largest acceptable loss of each criterion that has a margin."""
    suite_margins: dict[str, float] = {}
    """The same of each suite."""


class Recording(Frozen):
    """Log-probabilities in nats at the places of a probe, measured once."""

    adapter: list[float]
    base: list[float]
    parent: list[float] | None = None
    """None without a parent."""

    @property
    def versions(self) -> list[list[float]]:
        """Each one next to the one that it was trained from: base model, parent if there is one, adapter."""
        return [self.base, *([] if self.parent is None else [self.parent]), self.adapter]


class Probe(Frozen):
    """Tokens by whose log-probabilities a server is verified to answer with an adapter's weights, recorded twice in
    different batch shapes, so that the errors of the two recordings are independent."""

    texts: list[list[int]]
    """Token ids: prompts with continuations sampled from the adapter."""
    tasks: list[str] = []
    """The held-out task of each text, by id. Empty if they are not known."""
    places: list[tuple[int, int]]
    """The text and the position in it of each token, those that tell most first."""
    first: Recording
    """Texts as a whole. It has chosen the places."""
    second: Recording
    """Token by token, as a server measures them."""


LONGEST_SYSTEM_PROMPT: Final = 2_000
"""Characters of a system prompt in the result."""


class SystemPrompt(Frozen):
    text: str
    """Empty for rollouts without one; the beginning of one that is longer than `LONGEST_SYSTEM_PROMPT`."""
    rollouts: int


class Sampling(Frozen):
    """How the rollouts of a round were made."""

    temperature: float
    steps: int
    """Those of all stages."""
    prompts: int
    """Of a step of the last stage."""
    group_size: int
    """Rollouts of each prompt of the last stage."""
    system_prompts: list[SystemPrompt] = []
    """The most frequent ones, those of the most rollouts first."""
    further_system_prompts: int = 0
    """Number of different ones that are not listed."""


class StageResult(Frozen):
    """What a stage of a round ended with."""

    stage: str
    """`sft`, `dpo` or `grpo`; with its place in `training.stages` where a round has it more than once (`sft 2`)."""
    outcome: Literal["trained", "skipped"]
    reason: str = ""
    """Why it was skipped, or ended early."""
    steps: int = 0
    """Those that trained a token."""
    tasks: int = 0
    """The tasks that it could train on."""


class RoundResult(Frozen):
    """The result of a worker, written atomically when it ends."""

    round_id: str
    outcome: Literal["trained", "compared", "refused", "debug", "evaluated"]
    """`compared`: nothing was trained, another trainer had made the adapter."""
    reason: str = ""
    """Why it was refused, or training ended early."""
    adapter: AdapterRef | None = None
    """None after a debug round and after a refusal."""
    comparison: Comparison | None = None
    """None if nothing was compared, and so is the probe."""
    probe: Probe | None = None
    candidate: Candidate | None = None
    """Where the adapter comes from if another trainer made it."""
    left_out: dict[str, str] = {}
    """Tasks that were not trained on, by id, with the reason."""
    unmeasured: dict[str, str] = {}
    """Held-out tasks that were not asked, or whose loss was not measured, by id, with the reason."""
    partly: dict[str, str] = {}
    """Tasks of whose replies something was not trained on, by id: what, and why."""
    inexact: dict[str, str] = {}
    """Tasks whose prompt has another length than the traced one, by id, with the difference."""
    released: list[str] = []
    """Tasks of the pool that were not chosen, by id: the round does not have them any more."""
    without_gradient: list[str] = []
    """Tasks that gave no gradient, by id: their groups had too few rewards, or rewards that are equal."""
    stages: list[StageResult] = []
    steps: int = 0
    """Those that trained a token; of a debug round, those that were rolled out."""
    sampling: Sampling | None = None
    """None if there were no rollouts."""
    reward_first: float | None = None
    reward_last: float | None = None
    seconds: dict[str, float] = {}
    usage: dict[str, int] = {}
    versions: dict[str, str] = {}
    device: str = ""

    def explained(self, decision: str) -> str:
        """The gate's reason, with why training ended early."""
        return f"{decision}; {self.reason}" if self.reason else decision
