"""Why rounds leave a task out of training and gate, and which models' replies are trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import combinations
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec import Struct

HIDDEN_MESSAGE: Final = "the model was sent a message that the trace does not show"
HIDDEN_EARLIER: Final = "in an earlier turn the model was sent a message that the traces do not show"
NOT_RECORDED: Final = "the trace does not record what the model was sent"
OTHERWISE: Final = "the model was sent these messages in another order or form"
FINISH_FUNCTION: Final = "the model was also offered the function that hands in the answer"
TEMPLATE_PARAMETERS: Final = "the request has parameters of the chat template, which the prompt has not"
IMAGE: Final = "it holds an image, of which only a reference is kept"
"""Why a prompt is not exactly what the model was sent; `prompt_reason` joins those that hold."""


class Exclusion(StrEnum):
    """Why a round leaves a task out. Settings can take tasks with an image, and those whose prompt is not exact."""

    IMAGE = "image"
    HIDDEN = "hidden"
    INEXACT = "inexact"
    TOOLS = "tools"
    MODEL = "model"
    REPEATED = "repeated"


class Words(NamedTuple):
    """An exclusion for people: why such tasks are left out, and what can be done about it."""

    why: str
    remedy: str


_USE: Final = "`training.inexact_prompts: use` takes such tasks as they are"
WORDS: Mapping[Exclusion, Words] = MappingProxyType(
    {
        Exclusion.IMAGE: Words(
            "the prompt holds an image, of which only a reference is kept",
            "`training.images: text-only` takes its text",
        ),
        Exclusion.HIDDEN: Words(
            "the model was sent a message that the trace does not show, as AgentScope's runtime reminder",
            "make the agent with Agent(…, injection_config=InjectionConfig(inject_runtime_state=False)), from"
            f" agentscope.agent; {_USE}",
        ),
        Exclusion.INEXACT: Words("the prompt is not exactly what the model was sent", _USE),
        Exclusion.TOOLS: Words(
            "the agent was offered tools or called some, and a rollout is a single answer without them",
            "nothing: rollouts do not run tools",
        ),
        Exclusion.MODEL: Words(
            "another model than the alias, its versions and its base gave the answer",
            "`sources[].models.include` takes the replies of other models",
        ),
        Exclusion.REPEATED: Words(
            "a conversation in training begins exactly as this held-out one does",
            "nothing: the gate asks conversations that begin otherwise",
        ),
    }
)

_OF_REASON: Mapping[str, Exclusion] = MappingProxyType(
    {HIDDEN_MESSAGE: Exclusion.HIDDEN, HIDDEN_EARLIER: Exclusion.HIDDEN, IMAGE: Exclusion.IMAGE}
)


def joined(reasons: Iterable[str]) -> str:
    """Several reasons as one text."""
    return "; ".join(reasons)


def of_prompt(prompt_reason: str) -> set[Exclusion]:
    """What the reasons why a prompt is not exact exclude a task for; none of an exact one."""
    return {_OF_REASON.get(one, Exclusion.INEXACT) for one in prompt_reason.split("; ") if one}


def column(exclusions: Collection[Exclusion]) -> str:
    """How a task's column holds them: in the order of the enumeration, empty for none."""
    return " ".join(each.value for each in Exclusion if each in exclusions)


def parsed(text: str) -> tuple[Exclusion, ...]:
    """What a column holds."""
    return tuple(Exclusion(name) for name in text.split())


def columns_within(taken: Collection[Exclusion]) -> list[str]:
    """Every value of the column that holds nothing but what is `taken`, the empty one first."""
    return [column(some) for count in range(len(taken) + 1) for some in combinations(sorted(taken), count)]


class TrainedModels(Struct, frozen=True):
    """`alias` is what agents call, `base` what it stands for at first, and its versions are named `ALIAS@rNNNN`.

    Replies of these are trained on, and those of models that match a pattern of `include`; those that match one of
    `exclude` never are. A model whose name is not known counts as one of these.
    """

    alias: str = ""
    base: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def is_own(self, model: str, adapter: str) -> bool:
        """Whether the alias, a version of it or its base gave a reply that was asked of `model`."""
        version = f"{self.alias}@"
        return model in ("", self.alias, self.base) or adapter.startswith(version) or model.startswith(version)

    def trains(self, model: str, adapter: str) -> bool:
        """Whether such a reply is trained on."""
        if any(fnmatchcase(model, pattern) for pattern in self.exclude):
            return False
        return self.is_own(model, adapter) or any(fnmatchcase(model, pattern) for pattern in self.include)


ANY_MODEL: Final = TrainedModels(include=("*",))
"""Replies of all models are trained on."""
