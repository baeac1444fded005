"""AgentJet's workflow and judge classes as functions of the contract, and the parts of `ajet` that they import.

An AgentJet project names them as `package.module->Class`. Where `ajet` itself can be imported, its classes are used;
`astuner` is its earlier name. The classes are pydantic models, as theirs: pydantic must be in the user's interpreter,
which needs nothing else beside the standard library.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint
from flywheel.training.program.contract import StandIns, is_number

ROOTS: Final = ("ajet", "astuner")
EXECUTE: Final = ("agentscope_execute", "execute")
"""A workflow's method, the earlier name first: a base class may have the later one, too."""
INSTEAD: Final = dict.fromkeys(("AgentJetJob", "AstunerJob"), "start rounds with `flywheel round -c FILE.yaml`")
BRIDGE_VARIABLES: Final = ("DASHSCOPE_API_KEY", "DASHSCOPE_API_KEY_BACKUP")
"""What the `create_external_llm_fn` of an installed AgentJet reads."""
SECONDS: Final = 300.0
"""Longest call of a model that is not trained."""
TRIES: Final = 3
"""Of such a call."""
PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which another attempt may succeed."""
notes: Final[list[str]] = []
"""What users should know about the packages, in sentences."""


def install_shim(program: AgentProgram) -> None:
    """Make `ajet` and `astuner` importable where they are not, once. Raises ImportError without pydantic."""
    if any(isinstance(finder, _Packages) for finder in sys.meta_path):
        return
    notes.clear()
    missing = []
    unset = [name for name in BRIDGE_VARIABLES if name not in os.environ]
    for root in ROOTS:
        found, why = _imported(root)
        if found is None:
            missing.append(root)
        if why:
            notes.append(f"{why}: Flywheel's replacement is used")
        elif found is not None and unset:
            notes.append(
                f"{root} is the installed one ({found.__file__}): for its create_external_llm_fn,"
                f" rollout.agent_environment must name {' and '.join(unset)}"
            )
    if missing:
        # First: the folder of a package that cannot be imported stays where it is.
        sys.meta_path.insert(0, _Packages(missing, _stand_ins(program)))


def _imported(root: str) -> tuple[types.ModuleType | None, str]:
    """The package, or why one that was found is not used. A checkout may be without what it needs."""
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        return None, ""
    try:
        return importlib.import_module(root), ""
    except (Exception, SystemExit) as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == root]:
            del sys.modules[name]
        return None, f"{spec.origin} cannot be imported ({error})"


def _stand_ins(program: AgentProgram) -> dict[str, Any]:
    from pydantic import BaseModel, ConfigDict

    data = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    class Task(BaseModel):
        model_config = data
        main_query: str = ""
        init_messages: list[Any] = []
        task_id: str = ""
        env_type: str = ""
        metadata: dict[str, Any] = {}

    class WorkflowTask(BaseModel):
        model_config = data
        task: Task = Task()
        task_id: str = ""
        env_type: str = ""
        task_thread_index: int = 0
        task_batch_index: int = 0
        task_tag: str = ""
        episode_uuid: str = ""
        observation_window: dict[str, Any] = {}
        llm_inference_fn: Any = None
        tokenizer: Any = None
        gym_env: Any = None

    class WorkflowOutput(BaseModel):
        model_config = data
        reward: float | list[float] | None = None
        is_success: bool | None = None
        metadata: dict[str, Any] = {}
        log_metrics: dict[str, Any] = {}

    class Workflow(BaseModel):
        model_config = data
        name: str = "default_workflow"
        trainable_targets: list[str] | None = None

        async def execute(self, workflow_task: Any, tuner: Any) -> Any:
            raise NotImplementedError

    class BaseJudge:
        def __init__(self, config: Any) -> None:
            self.config = config

        def compute_reward(self, workflow_task: Any, workflow_output: Any) -> Any:
            raise NotImplementedError

    kinds = Task, WorkflowTask, WorkflowOutput, Workflow, BaseJudge, MathAnswerAsJudge
    return {
        **{kind.__name__: kind for kind in kinds},
        "AjetTuner": Tuner,
        "ModelTuner": Tuner,
        "create_external_llm_fn": external_models(program),
        "bp": lambda *_, **__: None,
    }


class MathAnswerAsJudge:
    """A mark: whether the answer's boxed result is the right one is decided by the check `math-equal`, which needs
    packages that this interpreter may not have."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def compute_reward(self, workflow_task: Any, workflow_output: Any) -> Any:
        raise NotImplementedError("it is decided outside of this process: name it as the judge")


class _Packages(StandIns):
    """The packages `roots` and any module below them. All have the same names; those that are missing here can be
    imported, and raise an error when they are used."""

    def __init__(self, roots: list[str], names: Mapping[str, Any]) -> None:
        super().__init__(
            lambda name: name.partition(".")[0] in roots,
            lambda module: {**names, "__getattr__": partial(_missing, module)},
        )


def _missing(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        what = INSTEAD.get(name, "install AgentJet beside the workflow")
        raise NotImplementedError(f"{name} of {module} is not available: {what}")

    return type(name, (), {"__init__": refuse})


def function_of(cls: type, program: AgentProgram) -> Callable[..., Any] | None:
    """The function of the contract that runs a class: of a workflow or a judge of AgentJet; None for any other."""
    method = next((name for name in EXECUTE if inspect.iscoroutinefunction(getattr(cls, name, None))), None)
    if method is not None:
        return _workflow_function(cls, method, program)
    has_reward = callable(getattr(cls, "compute_reward", None))
    return _judge_function(cls, ForeignSettings(program.config)) if has_reward else None


class ForeignSettings(dict[str, Any]):
    """A section with access by attribute and by item. At the root, `astuner` is `ajet`. Raises AttributeError or
    KeyError with the full path of a key that is missing."""

    def __init__(self, values: Mapping[str, Any], path: str = "config") -> None:
        super().__init__({key: _section(value, f"{path}.{key}") for key, value in values.items()})
        self._path = path
        if path == "config" and "ajet" in self:
            self["astuner"] = self["ajet"]

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(self._why(name) if not name.startswith("_") else name)

    def __missing__(self, key: str) -> Any:
        raise KeyError(self._why(key))

    def _why(self, name: str) -> str:
        return f"{self._path}.{name} is neither in the configuration nor a documented setting of AgentJet"


def _section(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return ForeignSettings(value, path)
    return (
        [_section(each, f"{path}.{place}") for place, each in enumerate(value)] if isinstance(value, list) else value
    )


class Response(str):
    """The answer of a workflow, with all of its output for the judge."""

    workflow_output: Any = None


@dataclass
class AgentJetResult:
    """What the contract reads."""

    reward: float | None
    response: Response | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def _workflow_function(cls: Any, method: str, program: AgentProgram) -> Callable[..., Any]:
    async def workflow(
        task: Any, model: Any, auxiliary_models: Mapping[str, Any] | None = None, logger: Any = None
    ) -> AgentJetResult:
        instance = cls()
        tuner = _tuner(task, model, auxiliary_models or {}, getattr(instance, "trainable_targets", None), program)
        # The name of the second parameter has changed.
        output = await getattr(instance, method)(_workflow_task(task), tuner)
        if tuner.refusal:  # which it has caught
            raise ValueError(tuner.refusal)
        answer = output.metadata.get("final_answer")
        if answer is None and output.metadata:
            answer = json.dumps(output.metadata, default=str, ensure_ascii=False)
        response = None if answer is None else Response(answer)
        if response is not None:
            response.workflow_output = output
        return AgentJetResult(_number(output.reward), response, _metrics(output))

    workflow.__name__ = workflow.__qualname__ = cls.__name__
    return workflow


def _judge_function(cls: Any, settings: ForeignSettings) -> Callable[..., Any]:
    judges: list[Any] = []

    async def judge(task: Any, response: Any, auxiliary_models: Any = None, logger: Any = None) -> AgentJetResult:
        output = getattr(response, "workflow_output", None)
        if output is None:
            output = importlib.import_module(ROOTS[0]).WorkflowOutput(metadata={"final_answer": str(response)})
        if output.reward is not None:
            # As in AgentJet: a workflow that rewards itself needs no judge.
            return AgentJetResult(_number(output.reward))
        if not judges:
            judges.append(cls(settings))
        found = await asyncio.to_thread(judges[0].compute_reward, _workflow_task(task), output)
        reward, *success = found if isinstance(found, tuple) else (found,)
        return AgentJetResult(reward, metrics={"is_success": float(bool(success[0]))} if success else {})

    judge.__name__ = judge.__qualname__ = cls.__name__
    judge.is_math_equal = cls is MathAnswerAsJudge  # type: ignore[attr-defined]
    return judge


def _workflow_task(task: Mapping[str, Any]) -> Any:
    schema = importlib.import_module(f"{ROOTS[0]}.schema.task")
    metadata = dict(task.get("metadata") or {})
    # AgentJet's judges look for the right answer there (see round_tasks.program_line).
    metadata.setdefault("answer", task.get("answer") or "")
    own = schema.Task(
        main_query=task.get("main_query") or "",
        init_messages=task.get("init_messages") or [],
        task_id=str(task.get("task_id") or ""),
        env_type=str(task.get("env_type") or ""),
        metadata=metadata,
    )
    return schema.WorkflowTask(task_id=own.task_id, env_type=own.env_type, task=own)


def _number(reward: Any) -> float | None:
    """A reward; of a list, the mean."""
    if isinstance(reward, list):
        return math.fsum(reward) / len(reward) if reward else None
    return reward  # type: ignore[no-any-return]


def _metrics(output: Any) -> dict[str, float]:
    # ASTuner's output has none.
    given = getattr(output, "log_metrics", {})
    # Arrays are left out, as texts are.
    logged = {name: value for name, value in given.items() if is_number(value) and not getattr(value, "ndim", 0)}
    return logged if output.is_success is None else {**logged, "is_success": float(output.is_success)}


def _tuner(
    task: Mapping[str, Any], model: Any, others: Mapping[str, Any], trainable: list[str] | None, program: AgentProgram
) -> Tuner:
    """A tuner that is also the chat model itself: the workflows of ASTuner pass it to their agents."""
    model = _with_typed_parts(model)
    kind = type("ModelTuner", (Tuner, type(model)), {})
    tuner: Tuner = object.__new__(kind)
    vars(tuner).update(vars(model))
    Tuner.__init__(tuner, task, model, others, trainable, program)
    return tuner


class Tuner:
    """What a workflow asks for its models. A `target_tag` that is a model's name in the configuration (`targets`,
    `rollout.auxiliary_models`) has that model. An agent of any other tag that is not trained uses its `debug_model`,
    if that has an address of its own, or else the auxiliary model of this name.

    Attributes:
        refusal: Why an agent got no model: only the policy could answer it, which its calls would train. Empty if
            all got one.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        model: Any,
        others: Mapping[str, Any],
        trainable: list[str] | None,
        program: AgentProgram,
    ) -> None:
        self._task, self._model, self._others, self._trainable = task, model, others, trainable
        self._program = program
        self._registered: dict[str, Any] = {}
        self.config = ForeignSettings(program.config)
        self.refusal = ""

    def as_agentscope_model(self, agent_name: str = "", target_tag: str = "", debug_model: Any = None) -> Any:
        """A chat model of AgentScope. Raises ValueError if only the policy could answer an agent that is not
        trained."""
        own = self._name_here(debug_model)
        if own is None and target_tag not in self._others and not self._is_trained(target_tag):
            return debug_model
        name = self._answering(target_tag, own or "")
        return self._model if name is None else _with_typed_parts(self._others[name])

    def register_model(self, target_name: str, default_model: Any = None) -> Any:
        """The chat model of a target, as in ASTuner: `default_model` where it is not trained."""
        self._registered[target_name] = self.as_agentscope_model(target_tag=target_name, debug_model=default_model)
        return self._registered[target_name]

    def get_model(self, target_name: str) -> Any:
        """The model of a registered target. Raises ValueError for another."""
        if target_name not in self._registered:
            raise ValueError(f"no model is registered as {target_name!r}: call register_model first")
        return self._registered[target_name]

    def as_oai_baseurl_apikey(self, agent_name: str = "", target_tag: str = "") -> SimpleNamespace:
        """`base_url`, `api_key` and `model` of an OpenAI API; without a tag the policy's. Raises ValueError as
        `as_agentscope_model`."""
        return self._address(self._answering(target_tag, "") if target_tag else None)

    def as_raw_openai_sdk_client(
        self, agent_name: str = "", target_tag: str = "", debug_model: str = "gpt-4o"
    ) -> Any:
        """An `AsyncOpenAI` whose requests need not name a model. Raises ValueError as `as_agentscope_model`."""
        from openai import AsyncOpenAI

        at = self._address(self._answering(target_tag, debug_model))
        client = AsyncOpenAI(base_url=at.base_url, api_key=at.api_key)
        create = client.chat.completions.create

        async def create_by_default(**parameters: Any) -> Any:
            return await create(**{**parameters, "model": at.model})

        client.chat.completions.create = create_by_default  # type: ignore[method-assign]
        return client

    def _is_trained(self, target: str) -> bool:
        return not self._trainable or target in self._trainable

    def _answering(self, target: str, debug_model: str) -> str | None:
        """The name of the configured model that answers agents of a target; None for the policy."""
        if target in self._others:
            return target
        if self._is_trained(target):
            return None
        if (found := self._program.auxiliary_name(debug_model or target)) is None:
            self.refusal = (
                f"{self._program.workflow} trains {' and '.join(self._trainable or ())}: its agent with target_tag"
                f" {target!r} and debug_model {debug_model!r} would be answered by the policy, and trained. Add a"
                " model of either name to rollout.auxiliary_models, or the tag to trainable_targets"
            )
            raise ValueError(self.refusal)
        return found

    def _address(self, name: str | None) -> SimpleNamespace:
        models = {**self._task["auxiliary_models"], **self._task["models"]}
        return SimpleNamespace(**(self._task["openai"] if name is None else models[name]))

    def _name_here(self, debug_model: Any) -> str | None:
        """The name under which a debug model asks at the policy's address, where `$OPENAI_BASE_URL` leads; None for
        one with an address of its own."""
        if debug_model is None or isinstance(debug_model, str):
            return debug_model or ""
        at = str(getattr(getattr(debug_model, "client", debug_model), "base_url", ""))
        if at.rstrip("/") != self._task["openai"]["base_url"].rstrip("/"):
            return None
        return str(getattr(debug_model, "model_name", "") or getattr(debug_model, "model", ""))


def _with_typed_parts(model: Any) -> Any:
    """The same model. One of AgentScope 1.x then also takes the messages of its DashScope formatter, whose text parts
    have no type."""
    kind = type(model)
    if getattr(kind, "_takes_untyped_parts", False) or not hasattr(model, "model_name"):
        return model

    async def call(self: Any, messages: Any, *arguments: Any, **options: Any) -> Any:
        return await kind.__call__(self, [_typed(message) for message in messages], *arguments, **options)

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call, "_takes_untyped_parts": True})
    return model


def _typed(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = [{"type": "text", **part} if isinstance(part, dict) and "text" in part else part for part in content]
    return {**message, "content": parts}


def external_models(program: AgentProgram) -> Callable[..., Callable[..., dict[str, str]]]:
    """`create_external_llm_fn` for the models that a program may ask."""

    def create_external_llm_fn(
        alien_llm_model: str, alien_llm_response_length: int | None = None
    ) -> Callable[..., dict[str, str]]:
        endpoint = _endpoint(program, alien_llm_model)

        def ask(
            messages: Sequence[Mapping[str, Any]],
            sampling_params_override: Mapping[str, Any] | None = None,
            request_id: str = "",
        ) -> dict[str, str]:
            body: dict[str, Any] = {"model": endpoint.model, "messages": list(messages), "n": 1, "temperature": 0.0}
            if alien_llm_response_length is not None:
                body["max_completion_tokens"] = alien_llm_response_length
            return _answer(endpoint, body | dict(sampling_params_override or {}))

        return ask

    return create_external_llm_fn


def _endpoint(program: AgentProgram, model: str) -> ModelEndpoint:
    """That of the auxiliary model of this name, or else the judge's."""
    if (name := program.auxiliary_name(model)) is not None:
        return program.auxiliary_models[name]
    if program.judge is None:
        raise RuntimeError(f"no endpoint has the model {model}: add it to rollout.auxiliary_models")
    return ModelEndpoint(program.judge.base_url, model, program.judge.api_key)


def _answer(endpoint: ModelEndpoint, body: Mapping[str, Any]) -> dict[str, str]:
    why = ""
    for left in reversed(range(TRIES)):
        # Several keys are written as `k1|k2`.
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {random.choice(endpoint.api_key.split('|')).strip()}",
        }
        url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                message = json.load(reply)["choices"][0]["message"]
            return {"role": str(message.get("role") or "assistant"), "content": str(message.get("content") or "")}
        except urllib.error.HTTPError as error:
            why = f"HTTP status {error.code}: {error.read(500).decode(errors='replace')}"
            if error.code not in PASSING:
                break
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        if left:
            time.sleep(1.0)
    raise RuntimeError(f"{endpoint} does not answer: {why}")
