"""How the user's functions are found, which are refused, and what may be returned."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flywheel.training.program.contract import (
    ContractError,
    RunError,
    arguments_of,
    check_signature,
    fields_of,
    load_function,
    response_of,
)
from tests.cases import for_each


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_is_found_from_the_working_directory(tmp_path: Path) -> None:
    package = tmp_path / "contract_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "agent.py").write_text("async def run(task, model): return 1\n")
    assert load_function("contract_package.agent:run").__module__ == "contract_package.agent"


def test_two_functions_of_a_file_share_its_module(tmp_path: Path) -> None:
    (tmp_path / "contract_both.py").write_text("def a(): ...\ndef b(): ...\n")
    assert load_function("contract_both.py:a").__globals__ is load_function("contract_both.py:b").__globals__


def test_a_file_named_like_a_loaded_module_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def a(): return 'mine'\n")
    assert load_function("json.py:a")() == "mine"
    assert not hasattr(sys.modules["json"], "a")


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def run(:\n")
    (tmp_path / "raising.py").write_text("def f():\n    return missing\n\nf()\n")
    (tmp_path / "needs.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "exits.py").write_text("raise SystemExit('no')\n")
    (tmp_path / "others.py").write_text("def walk(): ...\nclass Run: ...\nrun = 3\n")
    for spec, why in (
        ("nowhere.py:run", f"there is no file {tmp_path}/nowhere.py"),
        ("a_package_that_is_not_there.x:run", "No module named 'a_package_that_is_not_there'"),
        ("broken.py:run", "SyntaxError"),
        ("raising.py:run", "NameError: name 'missing' is not defined (raising.py, line 2)"),
        ("needs.py:run", f"No module named 'a_package_that_is_not_there'. It ran with {sys.executable}"),
        ("exits.py:run", "SystemExit: no"),
        ("others.py:wander", "others.py has no wander; it has walk"),
        ("others.py:Run", "is a class, not a function"),
        ("others.py:run", "is of type int, not a function"),
        ("others.py", "not of the form"),
    ):
        with pytest.raises(ContractError) as caught:
            load_function(spec)
        assert why in str(caught.value), spec


async def _plain(task: dict[str, Any], model: Any) -> float: ...
async def _whole(
    task: Any, model: Any, auxiliary_models: Any = None, logger: Any = None, style: str = "x"
) -> float: ...
async def _keywords(*, model: Any, **rest: Any) -> float: ...
async def _judge(task: Any, response: Any, logger: Any = None) -> float: ...


class _Callable:
    async def __call__(self, task: Any, model: Any) -> float: ...


GIVEN = {"task": 1, "model": 2, "auxiliary_models": 3, "logger": 4, "response": 5}


@for_each(
    "function, kind, passed",
    [
        (_plain, "workflow", {"task", "model"}),
        (_whole, "workflow", {"task", "model", "auxiliary_models", "logger"}),
        (_keywords, "workflow", {"task", "model", "auxiliary_models", "logger"}),
        (_judge, "judge", {"task", "response", "logger"}),
        (_Callable(), "workflow", {"task", "model"}),
        (functools.partial(_whole, style="y"), "workflow", {"task", "model", "auxiliary_models", "logger"}),
    ],
)
def test_functions_of_the_contract_are_accepted(function: Any, kind: Any, passed: set[str]) -> None:
    assert check_signature(function, kind).startswith("async def ")
    assert set(arguments_of(function, kind, GIVEN)) == passed


def test_a_signature_is_shown_in_one_line() -> None:
    assert check_signature(_whole, "workflow") == (
        f"async def _whole(task, model, auxiliary_models=None, logger=None, style='x') in {__file__}"
    )


def _sync(task: Any, model: Any) -> float: ...
async def _generator(task: Any, model: Any) -> Any:
    yield 1


async def _no_model(task: Any) -> float: ...
async def _nothing() -> float: ...
async def _more(task: Any, model: Any, environment: Any) -> float: ...
async def _positional(task: Any, model: Any, /) -> float: ...


@for_each(
    "function, kind, why",
    [
        (_sync, "workflow", "_sync in .* is not an async function: it must be `async def _sync"),
        (_generator, "workflow", "not an async function"),
        (_no_model, "workflow", "has no parameter model: it must be `async def _no_model.task, model, aux"),
        (_nothing, "workflow", "has no parameter task and model"),
        (_plain, "judge", "has no parameter response: it must be `async def _plain.task, response"),
        (_more, "workflow", "_more in .* cannot be called: missing a required argument: 'environment'; it must be"),
        (_positional, "workflow", "cannot be called: .* positional.only"),
        (print, "workflow", "not an async function"),
    ],
)
def test_other_functions_are_refused(function: Any, kind: Any, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        check_signature(function, kind)


@dataclass
class _Output:
    """As AgentScope's WorkflowOutput."""

    reward: Any = None
    response: Any = None
    metrics: Any = None


class _Message:
    content = ({"type": "text", "text": "from blocks"},)

    def get_text_content(self) -> str:
        return "from the message"


@dataclass
class _Data:
    numbers: list[int] = field(default_factory=lambda: [1, 2])


@for_each(
    "returned, expected",
    [
        (0.5, (0.5, None, {})),
        (1, (1.0, None, {})),
        ({"reward": 1, "metrics": {"is_right": True}}, (1.0, None, {"is_right": 1.0})),
        (np.float32(0.25), (0.25, None, {})),
        ({"reward": 0.5, "response": "yes", "metrics": {"turns": 3}}, (0.5, "yes", {"turns": 3.0})),
        (_Output(0.5, "yes", {"turns": np.int64(3)}), (0.5, "yes", {"turns": 3.0})),
        (_Output(response=""), (None, "", {})),
        (SimpleNamespace(response="yes"), (None, "yes", {})),
        (_Output(response=_Message()), (None, "from the message", {})),
        (_Output(response={"role": "assistant", "content": "a message"}), (None, "a message", {})),
        (
            _Output(response={"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}]}),
            (None, "a\nb", {}),
        ),
        (_Output(response={"answer": "ä"}), (None, '{"answer": "ä"}', {})),
        (_Output(response=_Data()), (None, '{"numbers": [1, 2]}', {})),
        (_Output(response="half a pair: \ud83d"), (None, "half a pair: ?", {})),
    ],
)
def test_results(returned: Any, expected: Any) -> None:
    assert fields_of(returned, "workflow") == expected


@for_each(
    "returned, cause, why",
    [
        (None, "no_result", "it returned nothing instead of a number or an object with reward, response and metrics"),
        ("the answer", "no_result", "a value of type str without reward and response"),
        ({}, "no_result", "of type dict"),
        (_Output(), "no_result", "of type _Output"),
        (math.nan, "not_a_number", "its reward is nan"),
        (math.inf, "not_a_number", "its reward is inf"),
        (True, "not_a_number", "its reward is True, a truth value: return 1.0 or 0.0"),
        ({"reward": np.bool_(False)}, "not_a_number", "its reward is False, a truth value"),
        (10**5000, "not_a_number", "its reward is "),
        (1e308, "not_a_number", "its reward is 1e+308, which is beyond ±1,000,000"),
        ({"reward": np.float64(-1_000_001)}, "not_a_number", "which is beyond ±1,000,000"),
        ({"reward": "0.5"}, "not_a_number", "its reward is '0.5', which is not a finite number"),
        ({"reward": 1, "metrics": {"loss": math.nan}}, "not_a_number", "its metric loss is nan"),
        ({"reward": 1, "metrics": {"name": "x"}}, "not_a_number", "its metric name is 'x'"),
        ({"reward": 1, "metrics": [1]}, "not_a_number", "its metrics are of type list"),
        (_Output(response=object()), "no_response", "an object of type object, which has no text"),
    ],
)
def test_what_is_no_result(returned: Any, cause: str, why: str) -> None:
    with pytest.raises(RunError) as caught:
        fields_of(returned, "workflow")
    assert caught.value.cause == cause
    assert why in str(caught.value)


def test_a_judge_needs_a_reward_and_its_response_is_not_read() -> None:
    assert fields_of({"reward": 1, "response": object()}, "judge") == (1.0, None, {})
    with pytest.raises(RunError, match="without reward instead of a number or an object with reward and metrics"):
        fields_of({"response": "yes"}, "judge")


def test_a_judge_gets_the_response_unchanged() -> None:
    message = _Message()
    assert response_of(_Output(response=message)) is message
    assert response_of({"response": [1]}) == [1]
    assert response_of(0.5) is None


def test_a_response_without_text_is_none_where_no_text_is_needed() -> None:
    assert fields_of(_Output(1, object()), "workflow", needs_text=False) == (1.0, None, {})
