"""A judge that imports Trinity's reward function, where Trinity is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flywheel.training.program.contract import load_function

JUDGE = r"""
async def judge(task, response):
    from trinity.common.rewards.math_reward import MathBoxedRewardFn

    return MathBoxedRewardFn()(response=response, truth=task["answer"].split("####")[1].strip(), **task["options"])
"""


@pytest.mark.parametrize(
    ("response", "options", "accuracy", "form"),
    [
        (r"So it is \boxed{42}.", {}, 1.0, 0.0),
        (r"\boxed{41}, no: \boxed{\frac{84}{2}}", {}, 1.0, 0.0),
        (r"\boxed{41}", {}, 0.0, 0.0),
        ("42", {}, 0.0, 0.0),
        ("", {}, 0.0, 0.0),
        (r"<think>six times seven</think> \boxed{42}", {"with_think": True}, 1.0, 0.0),
        (r"\boxed{42}", {"with_think": True, "format_score_coef": 0.2}, 1.0, -0.2),
    ],
)
async def test_it_gets_an_equivalent(
    tmp_path: Path, response: str, options: dict[str, object], accuracy: float, form: float
) -> None:
    assert importlib.util.find_spec("trinity") is None or importlib.util.find_spec("trinity.cli") is None
    (tmp_path / "judge_of_trinity.py").write_text(JUDGE)
    judge = load_function(f"{tmp_path}/judge_of_trinity.py:judge")
    task = {"answer": "6 * 7 = 42\n#### 42", "options": options}
    assert await judge(task=task, response=response) == {"accuracy": accuracy, "format_score": form}
