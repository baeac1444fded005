"""Why rounds leave a task out of training and gate, and which models' replies are trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import combinations
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct

from flywheel.records.request_id import BASE_BY_ID
from flywheel.records.states import Split

HIDDEN_MESSAGE: Final = "the model was sent a message that the trace does not show"
HIDDEN_EARLIER: Final = "in an earlier turn the model was sent a message that the traces do not show"
NOT_RECORDED: Final = "the trace does not record what the model was sent"
OTHER_PROMPT: Final = "the model was sent these messages in another order or form"
FINISH_FUNCTION: Final = "the model was also offered the function that hands in the answer"
TEMPLATE_PARAMETERS: Final = "the request has parameters of the chat template, which the prompt has not"
IMAGE: Final = "it holds an image, of which only a reference is kept"
"""Reasons why a prompt is not exactly what the model was sent. `prompt_reason` joins several with `; `."""


class Exclusion(StrEnum):
    """Why a round leaves a task out, unless settings include it (`Config.takes`).

    A task with tools has exactly one of `TOOLS`, `UNCALLED`, `UNRECORDED` and `UNDEFINED`.
    """

    IMAGE = "image"
    HIDDEN = "hidden"
    INEXACT = "inexact"
    TOOLS = "tools"
    """Calls of its tools have recorded results."""
    UNCALLED = "uncalled"
    UNRECORDED = "unrecorded"
    UNDEFINED = "undefined"
    MODEL = "model"
    TARGET = "target"
    REPEATED = "repeated"


class Words(NamedTuple):
    """An exclusion explained: why such tasks are excluded from rounds, what the user can do about it, the reason in a
    few words, and the setting that includes such tasks (empty: none does)."""

    why: str
    remedy: str
    few: str
    setting: str = ""


_USE: Final = "`training.inexact_prompts: use` takes such tasks as they are"
_INEXACT: Final = ("no exact prompt", "training.inexact_prompts")
WORDS: Mapping[Exclusion, Words] = MappingProxyType(
    {
        Exclusion.IMAGE: Words(
            "the prompt holds an image, of which only a reference is kept",
            "`training.images: text-only` takes its text",
            "image in the prompt",
            "training.images",
        ),
        Exclusion.HIDDEN: Words(
            "the model was sent a message that the trace does not show, as AgentScope's runtime reminder",
            "let the agent ask `flywheel serve`, which records its calls (serving.call_log); or create it with"
            " Agent(…, injection_config=InjectionConfig(inject_runtime_state=False)), from"
            f" agentscope.agent; {_USE}",
            *_INEXACT,
        ),
        Exclusion.INEXACT: Words("the prompt differs from what the model was sent", _USE, *_INEXACT),
        Exclusion.TOOLS: Words(
            "the agent called tools, and with `rollout.agent: reply` a rollout is a single message",
            "without `rollout.agent: reply`, tools answer from recordings",
            "tools called",
            "rollout.agent",
        ),
        Exclusion.UNCALLED: Words(
            "the agent was offered tools and called none: no recording could answer a call. The gate asks such tasks"
            " if their answers were accepted",
            "`rollout.tools.uncalled: use` trains on such tasks, unless `rollout.agent` is `reply`",
            "tools uncalled",
            "rollout.tools.uncalled",
        ),
        Exclusion.UNRECORDED: Words(
            "the agent called tools, and no call of a tool that it was offered has a recorded result",
            "trace the agent's tools, or let it ask `flywheel serve`, which records its calls (serving.call_log)",
            "no recorded tool result",
        ),
        Exclusion.UNDEFINED: Words(
            "the agent called tools, and the trace has no tool definitions",
            "let the instrumentation record the tools that the model is offered (`gen_ai.tool.definitions`; in a file"
            " `tools`), or let the agent ask `flywheel serve`, which records its calls (serving.call_log)",
            "no tool definitions in the trace",
        ),
        Exclusion.MODEL: Words(
            "the answer is by a model other than the alias, its versions and its base",
            "`sources[].models.include` takes the replies of other models",
            "answered by another model",
            "sources[].models.include",
        ),
        Exclusion.TARGET: Words(
            "the agent is of none of the `targets`: no target has its name or the alias that it called",
            "`targets.NAME.agents` names the agents of a target",
            "agent of no target",
            "targets.NAME.agents",
        ),
        Exclusion.REPEATED: Words(
            "a conversation in the training split begins exactly like this held-out one",
            "nothing: the gate uses conversations that begin differently",
            "repeated in training",
        ),
    }
)

INEXACT_PROMPT: Final = frozenset({Exclusion.IMAGE, Exclusion.HIDDEN, Exclusion.INEXACT})
"""The exclusions of a task whose prompt is not exactly what the model was sent."""
OF_REASON: Mapping[str, Exclusion] = MappingProxyType(
    {HIDDEN_MESSAGE: Exclusion.HIDDEN, HIDDEN_EARLIER: Exclusion.HIDDEN, IMAGE: Exclusion.IMAGE}
)
"""The exclusion that a reason implies; any other reason implies `INEXACT`."""


def column(exclusions: Collection[Exclusion]) -> str:
    """Exclusions as the text of a task's column, in the order of the enumeration; empty for none."""
    return " ".join(each.value for each in Exclusion if each in exclusions) if exclusions else ""


def parsed(text: str) -> tuple[Exclusion, ...]:
    """The exclusions in the text of a column."""
    return tuple(Exclusion(name) for name in text.split())


class Scope(NamedTuple):
    """Which tasks are looked at: those without exclusions, or with these only, of one target (None: of all)."""

    exclusions: frozenset[Exclusion] = frozenset()
    target: str | None = None
    if_accepted: frozenset[Exclusion] = frozenset()
    """Those of `exclusions` that only tasks with an accepted answer may have."""
    rejected_uses: int = 0
    """How many rounds may use a task with a rejected answer as a prompt; 0: none."""


EVERY_TARGET: Final = Scope()


class TaskScopes(NamedTuple):
    """What rounds take for training and gate: the exclusions in a scope do not keep tasks of that split from them."""

    train: Scope = EVERY_TARGET
    gate: Scope = EVERY_TARGET

    def leaving_out(self, text: str, split: Split, *, is_rejected: bool) -> list[Exclusion]:
        """Those in the text of a task's column that keep it from training, or from the gate if it is held out."""
        scope = self.gate if split is Split.HELD_OUT else self.train
        taken = scope.exclusions - scope.if_accepted if is_rejected else scope.exclusions
        return [each for each in parsed(text) if each not in taken]


NONE_SELECTED: Final = TaskScopes()


def columns_within(taken: Collection[Exclusion]) -> list[str]:
    """Every text of the column that has only exclusions in `taken`, beginning with the empty one."""
    return [column(some) for count in range(len(taken) + 1) for some in combinations(sorted(taken), count)]


class TargetNames(NamedTuple):
    """A target with the alias and the agents (names in traces) whose replies are its tasks."""

    target: str
    alias: str
    agents: tuple[str, ...] = ()


class TrainedModels(Struct, frozen=True):
    """Which models' replies are trained on: those of `alias`, its versions and `base`, and of `include`d models.

    `alias` is the stable name that agents call, and `base` the model behind it before the first round. Versions are
    named `ALIAS@rNNNN`. `include` and `exclude` are names or patterns; `exclude` wins. An unknown model counts as the
    alias. With several `targets`, their aliases take the place of `alias`.
    """

    alias: str = ""
    base: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    targets: tuple[TargetNames, ...] = ()
    teachers: tuple[str, ...] = ()
    """Models whose replies are imitated: names or patterns."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """The stable names that agents call; none if no alias is known."""
        if self.targets:
            return tuple(each.alias for each in self.targets)
        return (self.alias,) if self.alias else ()

    def target_of(self, agent: str, model: str, adapter: str) -> str:
        """The target whose task a reply is: that of the alias that was called, else that of the agent's name. Empty
        for none, and without targets."""
        if not self.targets:
            return ""
        by_alias = {each.alias: each.target for each in self.targets}
        by_agent = {name: each.target for each in self.targets for name in each.agents}
        called = (by_alias.get(name.partition("@")[0]) for name in (adapter, model))
        return next(filter(None, called), None) or by_agent.get(agent, "")

    def is_own(self, model: str, adapter: str) -> bool:
        """Whether a reply requested from `model` and given by `adapter` is one of the alias, a version or the
        base."""
        versions = tuple(f"{alias}@" for alias in self.aliases)
        return (
            model in ("", BASE_BY_ID, self.base, *self.aliases)
            or adapter.startswith(versions)
            or model.startswith(versions)
        )

    def trains(self, model: str, adapter: str) -> bool:
        """Whether such a reply is trained on."""
        if _matches(model, self.exclude):
            return False
        return self.is_own(model, adapter) or _matches(model, (*self.include, *self.teachers))

    def is_teacher(self, model: str, adapter: str) -> bool:
        """Whether such a reply is one of a teacher."""
        is_own = self.is_own(model, adapter)
        return not is_own and not _matches(model, self.exclude) and _matches(model, self.teachers)


def _matches(model: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in patterns)


ANY_MODEL: Final = TrainedModels(include=("*",))
