"""Whose replies are trained on."""

from __future__ import annotations

import pytest

from flywheel.records.exclusion import ANY_MODEL, TrainedModels


@pytest.mark.parametrize(
    ("model", "adapter", "own"),
    [
        ("my-agent", "", True),
        ("my-agent@r0007", "", True),
        ("/models/base", "", True),
        ("", "", True),
        ("gateway", "my-agent@r0007", True),
        ("gateway", "other@r0007", False),
        ("my-agent-2", "", False),
        ("gpt-4o", "", False),
    ],
)
def test_the_alias_its_versions_and_its_base_are_own(model: str, adapter: str, own: bool) -> None:
    models = TrainedModels("my-agent", "/models/base")
    assert models.is_own(model, adapter) is own
    assert models.trains(model, adapter) is own
    assert ANY_MODEL.trains(model, adapter)


@pytest.mark.parametrize(
    ("include", "exclude", "trained"),
    [
        ((), (), {"my-agent"}),
        (("gpt-*",), (), {"my-agent", "gpt-4o", "gpt-5"}),
        (("*",), ("gpt-4o",), {"my-agent", "gpt-5", "qwen-max"}),
        ((), ("my-*",), set()),
        (("qwen-max",), (), {"my-agent", "qwen-max"}),
    ],
)
def test_patterns_add_models_and_take_some_away(
    include: tuple[str, ...], exclude: tuple[str, ...], trained: set[str]
) -> None:
    models = TrainedModels("my-agent", "/models/base", include, exclude)
    names = ("my-agent", "gpt-4o", "gpt-5", "qwen-max")
    assert {name for name in names if models.trains(name, "")} == trained
