"""The states of replies, tasks, rounds, adapters, deployments and others, and the legal transitions.

Transitions are data: `TRANSITIONS` is their only definition, and the store refuses all others. A change is
compare-and-set (`UPDATE … WHERE id = ? AND state = ?`), with a row in `events` in the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class ReplyState(StrEnum):
    """The states of a reply."""

    OPEN = "open"
    """its trace is incomplete or still changing, or a batch has only its request or its response so far"""
    CLOSED = "closed"
    """its trace is complete"""
    CONVERTED = "converted"
    """it is a task"""
    SKIPPED = "skipped"
    """it never becomes a task, for a `SkipReason`; it is opened again if its trace goes on"""
    DEAD = "dead"
    """it cannot be read: see its dead letter"""
    ERASED = "erased"
    """a person had its texts erased; it is not read again"""


class SkipReason(StrEnum):
    """Why a reply never becomes a task."""

    NESTED = "nested"
    """an agent called inside another agent's tool: no user saw it"""
    PIPELINE_STAGE = "pipeline_stage"
    """an earlier stage of a pipeline: the next agent saw it, not the user"""
    ERROR = "error"
    """the agent span ended with an error or without an answer"""
    INTERRUPTED = "interrupted"
    """the user stopped the agent in the middle of its reply"""
    UNFINISHED = "unfinished"
    """the agent span never arrived (its process died), or the agent stopped until a tool is allowed or carried out"""
    NO_QUERY = "no_query"
    """the span holds no question to answer"""
    NO_ANSWER = "no_answer"
    """a line of a task file without an answer: there is nothing to judge"""
    AMBIGUOUS = "ambiguous"
    """a response in a batch, whose `custom_id` several requests of its folder have: one folder per batch"""
    TRUNCATED = "truncated"
    """its question or its answer was cut, by a limit on the length of attributes"""
    RECORDED = "recorded"
    """another source has the same model calls: their trace, or the calls alone"""
    AGENT_EXCLUDED = "agent_excluded"
    """the configuration excludes this agent"""
    PRIVATE = "private"
    """its trace refuses recording, or `privacy.exclude` names its user, conversation or agent: it is only counted"""
    IN_TASK_FILE = "in_task_file"
    """it stands in the task file that AgentJet wrote, and was judged there"""
    REFUSED = "refused"
    """a model wrote it from a document, and a quote is not there, or it repeats another such task"""


class TaskState(StrEnum):
    """The states of a task."""

    PENDING = "pending"
    """it waits to be judged"""
    JUDGING = "judging"
    """it is being filtered or judged; after a crash it is pending again"""
    ACCEPTED = "accepted"
    """it is a sample, or a held-out task of the gate"""
    REJECTED = "rejected"
    """the rubric, a filter or a person rejected it"""
    UNDECIDED = "undecided"
    """the judge did not decide; it is judged again later"""
    RESERVED = "reserved"
    """an unfinished round, or one whose candidate waits, uses it"""
    CONSUMED = "consumed"
    """a promoted round, or as many compared rounds as are allowed, have used it"""
    DEAD = "dead"
    """it cannot be judged: see its dead letter"""
    HELD = "held"
    """set aside for a person: one of a burst of near-identical questions, or written by a model from a document"""
    WITHDRAWN = "withdrawn"
    """its trace continued and it is no longer a reply; the judge had not been called for it"""
    ERASED = "erased"
    """a person had its texts erased; its row stays, and nothing takes it any more"""


ACCEPTED: Final = (TaskState.ACCEPTED, TaskState.RESERVED, TaskState.CONSUMED)
"""States of accepted tasks: they stay accepted when a round takes them."""
JUDGED: Final = (*ACCEPTED, TaskState.REJECTED)
"""States of tasks that are accepted or rejected."""
ABSENT: Final = (TaskState.WITHDRAWN, TaskState.ERASED)
"""States of tasks that no count, list or export includes, unless it is asked for them."""


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held-out"


class RoundState(StrEnum):
    """The states of a round."""

    PLANNED = "planned"
    """its specification is written; its worker is not running"""
    TRAINING = "training"
    """its worker runs"""
    EVALUATING = "evaluating"
    """its result is there; it is compared, decided and, if better, swapped in"""
    PASSED = "passed"
    """its adapter was shown to be better and waits, as for a person (`gate.mode: manual`); other rounds go on"""
    PROMOTED = "promoted"
    """its adapter was shown to be better and is deployed"""
    REJECTED = "rejected"
    """its adapter was not shown to be better, or was, and nobody wanted it; or training was aborted and left none"""
    FAILED = "failed"
    """it ended with an error"""
    ABANDONED = "abandoned"
    """its worker died; it is planned again while attempts last"""


class AdapterState(StrEnum):
    """The states of an adapter."""

    STAGED = "staged"
    """its files are written"""
    READY = "ready"
    """its files are those that were evaluated, and it may be deployed"""
    RETIRED = "retired"
    """it has served, and another adapter serves now"""
    CORRUPT = "corrupt"
    """its files are not those that were evaluated"""
    REMOVED = "removed"
    """its files are removed or being removed: nothing needs them"""


class DeploymentState(StrEnum):
    """The states of a deployment, one swap of an alias."""

    REQUESTED = "requested"
    """a swap was asked for"""
    LOADING = "loading"
    """the servers load the adapter"""
    PROBING = "probing"
    """the servers are asked which weights they answer with"""
    ACTIVE = "active"
    """the alias is pointed at it"""
    DRAINING = "draining"
    """another one is active; requests in flight end"""
    RETIRED = "retired"
    """no request uses it"""
    FAILED = "failed"
    """the swap failed before it was active, and the old adapter stays"""


class WatchState(StrEnum):
    """The states of the watch of a promotion."""

    WATCHING = "watching"
    """both versions answer, and their outcomes are compared"""
    ROLLING_BACK = "rolling_back"
    """the new version was shown to be worse; the one before is to answer all"""
    ROLLED_BACK = "rolled_back"
    """the version before answers all"""
    KEPT = "kept"
    """no loss was shown; the new version answers all"""
    NOT_SHOWN = "not_shown"
    """too few conversations had an outcome to show a loss or none; the new version answers all"""
    REPLACED = "replaced"
    """a person deployed another version or rolled back before the watch ended"""


class DeadLetterState(StrEnum):
    """The states of a dead letter."""

    OPEN = "open"
    """it waits for a person"""
    RETRIED = "retried"
    """tried again; if that fails too, it is opened again"""
    DROPPED = "dropped"
    """closed for good"""


class RequestState(StrEnum):
    """The states of a request, an action that a person asks for."""

    OPEN = "open"
    """it is not carried out yet"""
    DONE = "done"
    """it was carried out, once"""
    FAILED = "failed"
    """it could not be carried out; the error says why"""


class Label(StrEnum):
    """What a person says of a reply."""

    ACCEPT = "accept"
    REJECT = "reject"
    UNSURE = "unsure"


_R, _T, _RO, _A, _D = ReplyState, TaskState, RoundState, AdapterState, DeploymentState
_L, _W = DeadLetterState, WatchState
_Table = Mapping[StrEnum, frozenset[StrEnum]]

# One table per kind: members of different StrEnums compare equal by text (a reply's and a task's "dead").
TRANSITIONS: Final[Mapping[type[StrEnum], _Table]] = {
    ReplyState: {
        _R.OPEN: frozenset({_R.CLOSED, _R.SKIPPED, _R.DEAD, _R.ERASED}),
        _R.CLOSED: frozenset({_R.OPEN, _R.CONVERTED, _R.SKIPPED, _R.DEAD, _R.ERASED}),
        # The agent span of a reply that was given up can still arrive: its exporter was only late.
        _R.SKIPPED: frozenset({_R.OPEN, _R.ERASED}),
        # A trace that goes on opens its reply again, while no verdict has been paid for.
        _R.CONVERTED: frozenset({_R.OPEN, _R.ERASED}),
        _R.DEAD: frozenset({_R.OPEN, _R.ERASED}),
        _R.ERASED: frozenset(),
    },
    TaskState: {
        _T.PENDING: frozenset({_T.JUDGING, _T.DEAD, _T.WITHDRAWN, _T.HELD, _T.ERASED}),
        _T.JUDGING: frozenset({_T.ACCEPTED, _T.REJECTED, _T.UNDECIDED, _T.DEAD, _T.PENDING, _T.HELD, _T.ERASED}),
        _T.UNDECIDED: frozenset({_T.JUDGING, _T.PENDING, _T.DEAD, _T.HELD, _T.ERASED}),
        _T.HELD: frozenset({_T.PENDING, _T.REJECTED, _T.ERASED}),
        _T.ACCEPTED: frozenset({_T.RESERVED, _T.PENDING, _T.HELD, _T.ERASED}),
        _T.REJECTED: frozenset({_T.PENDING, _T.ERASED}),
        _T.RESERVED: frozenset({_T.CONSUMED, _T.ACCEPTED, _T.ERASED}),
        _T.CONSUMED: frozenset({_T.ERASED}),
        _T.DEAD: frozenset({_T.PENDING, _T.ERASED}),
        _T.WITHDRAWN: frozenset({_T.PENDING, _T.ERASED}),
        _T.ERASED: frozenset(),
    },
    RoundState: {
        _RO.PLANNED: frozenset({_RO.TRAINING, _RO.FAILED}),
        _RO.TRAINING: frozenset({_RO.EVALUATING, _RO.FAILED, _RO.ABANDONED}),
        _RO.EVALUATING: frozenset({_RO.PASSED, _RO.PROMOTED, _RO.REJECTED, _RO.FAILED, _RO.ABANDONED}),
        _RO.PASSED: frozenset({_RO.PROMOTED, _RO.REJECTED, _RO.FAILED}),
        _RO.ABANDONED: frozenset({_RO.PLANNED, _RO.FAILED}),
        _RO.PROMOTED: frozenset(),
        _RO.REJECTED: frozenset(),
        _RO.FAILED: frozenset(),
    },
    AdapterState: {
        _A.STAGED: frozenset({_A.READY, _A.CORRUPT}),
        _A.READY: frozenset({_A.RETIRED, _A.CORRUPT, _A.REMOVED}),
        _A.RETIRED: frozenset({_A.READY, _A.CORRUPT, _A.REMOVED}),
        # Files that were put back from a backup are what was evaluated again.
        _A.CORRUPT: frozenset({_A.READY, _A.REMOVED}),
        _A.REMOVED: frozenset({_A.READY}),
    },
    DeploymentState: {
        _D.REQUESTED: frozenset({_D.LOADING, _D.FAILED}),
        _D.LOADING: frozenset({_D.PROBING, _D.FAILED}),
        _D.PROBING: frozenset({_D.ACTIVE, _D.FAILED}),
        _D.ACTIVE: frozenset({_D.DRAINING}),
        _D.DRAINING: frozenset({_D.RETIRED}),
        _D.RETIRED: frozenset(),
        _D.FAILED: frozenset(),
    },
    WatchState: {
        _W.WATCHING: frozenset({_W.ROLLING_BACK, _W.KEPT, _W.NOT_SHOWN, _W.REPLACED}),
        _W.ROLLING_BACK: frozenset({_W.ROLLED_BACK, _W.REPLACED}),
        _W.ROLLED_BACK: frozenset(),
        _W.KEPT: frozenset(),
        _W.NOT_SHOWN: frozenset(),
        _W.REPLACED: frozenset(),
    },
    DeadLetterState: {
        _L.OPEN: frozenset({_L.RETRIED, _L.DROPPED}),
        _L.RETRIED: frozenset({_L.OPEN}),
        _L.DROPPED: frozenset(),
    },
    RequestState: {
        RequestState.OPEN: frozenset({RequestState.DONE, RequestState.FAILED}),
        RequestState.DONE: frozenset(),
        RequestState.FAILED: frozenset(),
    },
}

LIVE_ROUND: Final = (RoundState.PLANNED, RoundState.TRAINING, RoundState.EVALUATING, RoundState.ABANDONED)
"""A round in one of these keeps the next one waiting."""
