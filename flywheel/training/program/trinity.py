"""What judges of AgentScope's tuner import from Trinity-RFT, where that is not installed."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Final

MODULES: Final = ("trinity", "trinity.common", "trinity.common.rewards", "trinity.common.rewards.math_reward")
_THOUGHT: Final = re.compile(r"\s*<think>.*?</think>(?!.*</?think>).*", re.DOTALL)


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


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["MathBoxedRewardFn"] = MathBoxedRewardFn


def install_shim() -> None:
    """Make `MathBoxedRewardFn` importable. It comes last: Trinity itself is found before it."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
