"""The contract of the user's functions: their names, their parameters, the models they get, what they may return.

It is that of AgentScope's tuner: `async def run(task, model, auxiliary_models=None, logger=None)` for a workflow and
`async def judge(task, response, auxiliary_models=None, logger=None)` for a judge, called by keyword. It runs in the
user's interpreter: only the standard library is imported, and AgentScope where that is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

from flywheel.records.program_run import LARGEST_REWARD, FailureCause
from flywheel.system.python_files import FunctionName, parsed
from flywheel.training.program.agent_program import AgentProgram, ModelEndpoint

Kind = Literal["workflow", "judge"]

ESSENTIAL: Final[Mapping[Kind, tuple[str, ...]]] = {"workflow": ("task", "model"), "judge": ("task", "response")}
MAX_SHOWN: Final = 200
"""Characters of a returned value that are shown."""
OPTIONAL: Final = ("auxiliary_models", "logger")
FIELDS: Final[Mapping[Kind, str]] = {
    "workflow": "a number or an object with reward, response and metrics",
    "judge": "a number or an object with reward and metrics",
}
_OURS: Final = {*map(str, Path(__file__).parent.glob("*.py")), "<frozen importlib._bootstrap>"}
_PLAIN: Final = (str, bytes, list, tuple, set, frozenset)
TRINITY_MODULES: Final = ("trinity", "trinity.common", "trinity.common.rewards", "trinity.common.rewards.math_reward")
_THOUGHT: Final = re.compile(r"\s*<think>.*?</think>(?!.*</?think>).*", re.DOTALL)


class ContractError(Exception):
    """The function does not load or does not follow the contract; the text is a sentence for the user."""


class RunError(Exception):
    """A run gave nothing to learn from; the text says why."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        self.cause = cause
        super().__init__(message)


def load_function(spec: str, program: AgentProgram | None = None) -> Callable[..., Any]:
    """The function of `FILE.py:function` or `package.module:function`, or an object that is called like one for
    AgentJet's `package.module->Class`, whose settings are in `program`. Raises ContractError."""
    found = parsed(spec)
    if found is None:
        raise ContractError(f"{spec} is not of the form FILE.py:function or package.module:function")
    where, name = found.where, found.name
    if _TRINITY not in sys.meta_path:
        sys.meta_path.append(_TRINITY)
    if found.is_class:
        # Where AgentJet runs, and where a checkout of it is.
        _add_path(Path.cwd())
        try:
            # Imported only here: few need it.
            importlib.import_module("flywheel.training.program.agentjet").install_shim(program or AgentProgram())
        except ImportError as error:
            raise ContractError(f"{spec} does not load: {error}. It ran with {sys.executable}") from error
    module = _load_module(found)
    if not hasattr(module, name):
        others = [
            other
            for other, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
            and (inspect.isclass(value) if found.is_class else inspect.isfunction(value))
        ]
        has = f"; it has {', '.join(others[:8])}" if others else ""
        raise ContractError(f"{where} has no {name}{has}")
    function = getattr(module, name)
    if found.is_class:
        return _function_of_class(function, spec, program or AgentProgram())
    if inspect.isclass(function):
        raise ContractError(f"{name} in {where} is a class, not a function: a class of AgentJet is {where}->{name}")
    if not callable(function):
        raise ContractError(f"{name} in {where} is of type {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def check_signature(function: Callable[..., Any], kind: Kind) -> str:
    """One line that describes the function. Raises ContractError if it cannot be called as the contract says."""
    name, where = getattr(function, "__name__", type(function).__name__), _place(function)
    wanted = f"async def {name}({', '.join((*ESSENTIAL[kind], *(f'{each}=None' for each in OPTIONAL)))})"
    if not _is_async(function):
        raise ContractError(f"{name}{where} is not an async function: it must be `{wanted}`")
    signature = inspect.signature(function)
    given = arguments_of(function, kind, dict.fromkeys((*ESSENTIAL[kind], *OPTIONAL)))
    if missing := [name for name in ESSENTIAL[kind] if name not in given]:
        raise ContractError(f"{name}{where} has no parameter {' and '.join(missing)}: it must be `{wanted}`")
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ContractError(f"{name}{where} cannot be called: {error}; it must be `{wanted}`") from None
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    bare = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return f"async def {name}{bare}{where}"


def arguments_of(function: Callable[..., Any], kind: Kind, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the contract's arguments that a checked function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: given[name] for name in (*ESSENTIAL[kind], *OPTIONAL) if takes_all or name in parameters}


def fields_of(
    returned: Any, kind: Kind, *, needs_text: bool = True
) -> tuple[float | None, str | None, dict[str, float]]:
    """Reward, response and metrics of what a function returned: a number, or an object or dict with these fields.
    That of a judge has no response. Raises RunError, also for a response without text if `needs_text`."""
    if is_number(returned):
        return _reward(returned), None, {}
    if returned is None:
        raise RunError("no_result", f"it returned nothing instead of {FIELDS[kind]}")
    reward, metrics = _field(returned, "reward"), _field(returned, "metrics")
    response = None if kind == "judge" else _field(returned, "response")
    if reward is None and response is None:
        without = "reward" if kind == "judge" else "reward and response"
        what = f"a value of type {type(returned).__name__} without {without}"
        raise RunError("no_result", f"it returned {what} instead of {FIELDS[kind]}")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise RunError("not_a_number", f"its metrics are of type {type(metrics).__name__}, not numbers by name")
    return (
        None if reward is None else _reward(reward),
        None if response is None else _text(response, needs_text),
        {str(name): _finite(value, f"metric {name}") for name, value in (metrics or {}).items()},
    )


def response_of(returned: Any) -> Any:
    """The response of what a function returned, as it is: a judge function gets it unchanged."""
    return None if is_number(returned) else _field(returned, "response")


def text_of(response: Any) -> str | None:
    """The text of a response: a string, an AgentScope message, a chat message with text blocks, or data as JSON. None
    for anything else."""
    if isinstance(response, str):
        return response
    if callable(read := getattr(response, "get_text_content", None)):
        return str(read() or "")
    content = _field(response, "content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = [_field(each, "text") for each in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    if callable(dump := getattr(response, "model_dump", None)):  # of pydantic
        response = dump()
    elif dataclasses.is_dataclass(response) and not isinstance(response, type):
        response = dataclasses.asdict(response)
    try:
        return json.dumps(response, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


def described(error: BaseException) -> str:
    """As one line, with the innermost line of the user's code, or else of any."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in _OURS]
    own = [frame for frame in frames if not is_installed(frame.filename)]
    place = (own or frames)[-1:]
    # A syntax error names its line itself.
    named = place and not isinstance(error, SyntaxError)
    where = f" ({Path(place[0].filename).name}, line {place[0].lineno})" if named else ""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    except Exception:
        text = type(error).__name__
    return f"{text}{where}{_for_agentscope_1(error)}"


def is_installed(path: str) -> bool:
    """Whether a file is of the standard library or of an installed package."""
    return "site-packages" in path or "/lib/python" in path


def folder_of(spec: str) -> str:
    """The folder of the file of a function that is loaded."""
    found = parsed(spec)
    module = None if found is None or found.is_in_file else sys.modules.get(found.where)
    file = getattr(module, "__file__", None) if found is None or not found.is_in_file else found.where
    return str(Path(file).absolute().parent if file else Path.cwd())


def _for_agentscope_1(error: BaseException) -> str:
    """What to do about an import from AgentScope 2.x that fails; empty for other errors."""
    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] != "agentscope":
        return ""
    try:
        version = importlib.metadata.version("agentscope")
    except importlib.metadata.PackageNotFoundError:
        return ""
    if version.startswith("1."):
        return ""
    return (
        f". {sys.executable} has AgentScope {version}. A workflow for 1.x needs an interpreter of its own:"
        " `flywheel workflow env` makes one for rollout.agent.python"
    )


def shown(value: Any) -> str:
    """Its repr, shortened."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"an object of type {type(value).__name__} whose repr raised {type(error).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _load_module(found: FunctionName) -> ModuleType:
    where = found.where
    try:
        return _load_file(Path(where).absolute()) if found.is_in_file else _import(where)
    except ContractError:
        raise
    except ModuleNotFoundError as error:
        why = f"{where} does not load: {error}. It ran with {sys.executable}{_for_agentscope_1(error)}"
        raise ContractError(why) from error
    except (Exception, SystemExit) as error:
        raise ContractError(f"{where} does not load: {described(error)}") from error


def _import(name: str) -> ModuleType:
    # As with `python -m`: first from the working directory.
    _add_path(Path.cwd())
    return importlib.import_module(name)


def _add_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ContractError(f"there is no file {path}")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    # As with `python FILE.py`: modules beside it can be imported.
    _add_path(path.parent)
    # Under its own name if that is free, so that what it defines can be pickled.
    free = path.stem.isidentifier() and path.stem not in sys.modules
    name = path.stem if free else f"flywheel_file_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _function_of_class(cls: Any, spec: str, program: AgentProgram) -> Callable[..., Any]:
    if not inspect.isclass(cls):
        raise ContractError(f"{spec} is of type {type(cls).__name__}, not a class: a function is named with a colon")
    function = importlib.import_module("flywheel.training.program.agentjet").function_of(cls, program)
    if function is None:
        raise ContractError(f"{spec} is neither a workflow nor a judge class of AgentJet")
    return function  # type: ignore[no-any-return]


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    # Or an object with an async method __call__.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(vars(type(function)).get("__call__"))


def _place(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" in {code.co_filename}" if code is not None else ""


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(response: Any, needed: bool) -> str | None:
    text = text_of(response)
    if text is None and needed:
        kind = type(response).__name__
        raise RunError("no_response", f"its response is an object of type {kind}, which has no text")
    # Half a surrogate pair cannot be sent to a judge.
    return None if text is None else text.encode(errors="replace").decode()


def is_number(value: Any) -> bool:
    """Also for those of NumPy and tensors of one element."""
    return isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, _PLAIN))


def _reward(value: Any) -> float:
    # Those of NumPy are called `bool` or `bool_`.
    if type(value).__name__ in ("bool", "bool_"):
        raise RunError("not_a_number", f"its reward is {value}, a truth value: return 1.0 or 0.0")
    if abs(number := _finite(value, "reward")) > LARGEST_REWARD:
        raise RunError("not_a_number", f"its reward is {shown(value)}, which is beyond ±{LARGEST_REWARD:,.0f}")
    return number


def _finite(value: Any, what: str) -> float:
    try:
        number = float(value) if is_number(value) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise RunError("not_a_number", f"its {what} is {shown(value)}, which is not a finite number")
    return number


def chat_model(endpoint: ModelEndpoint) -> Any:
    """The model of an endpoint for the user's function: AgentScope's `OpenAIChatModel`, of 2.x or 1.x, which does not
    stream. Without AgentScope it is the endpoint itself, which has what an OpenAI client needs."""
    if importlib.util.find_spec("agentscope") is None:
        return endpoint
    chat = importlib.import_module("agentscope.model").OpenAIChatModel
    parameters = inspect.signature(chat).parameters
    if "credential" in parameters:  # 2.x
        credential = importlib.import_module("agentscope.credential").OpenAICredential
        return chat(
            credential=credential(api_key=endpoint.api_key, base_url=endpoint.base_url),
            model=endpoint.model,
            stream=False,
        )
    # 1.x; its name for what the openai client gets has changed.
    client = "client_kwargs" if "client_kwargs" in parameters else "client_args"
    return chat(
        model_name=endpoint.model, api_key=endpoint.api_key, stream=False, **{client: {"base_url": endpoint.base_url}}
    )


class MathBoxedRewardFn:
    """1 as `accuracy` if the last boxed result of a response equals the right one, compared as by `math-equal`."""

    def __init__(self, **_: Any) -> None: ...

    def __call__(
        self,
        response: str,
        truth: str | None = None,
        with_think: bool | None = False,
        format_score_coef: float | None = 0.1,
        **_: Any,
    ) -> dict[str, float]:
        try:
            # Only here: it needs what workflows and other judges do not.
            from flywheel.judge.rubric.checks.math_equal import equals_boxed
        except ImportError as error:
            from flywheel.system import own_package

            install = f"{sys.executable} -m pip install {own_package.requirement()}"
            raise ImportError(f"MathBoxedRewardFn needs Flywheel's base install ({error}): {install}") from error
        is_right = truth is not None and equals_boxed(response or "", str(truth))
        lacks_thought = bool(with_think) and _THOUGHT.fullmatch(response or "") is None
        return {"accuracy": float(is_right), "format_score": -(format_score_coef or 0.1) if lacks_thought else 0.0}


class StandIns(MetaPathFinder, Loader):
    """Finds the modules that `has` names; `names` has what is in one of them."""

    def __init__(self, has: Callable[[str], bool], names: Callable[[str], Mapping[str, Any]]) -> None:
        self._has, self._names = has, names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self._has(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._names(module.__name__))


_TRINITY: Final = StandIns(TRINITY_MODULES.__contains__, lambda _: {"MathBoxedRewardFn": MathBoxedRewardFn})
"""What judges of AgentScope's tuner import from Trinity-RFT, where that is not installed. It comes last: Trinity
itself is found before it."""
