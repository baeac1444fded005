"""What is said to be installed can be: by the name only where an index has it."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.system import own_package
from tests.cases import for_each


@for_each(
    "origin, wanted",
    [
        (None, "'agentscope-flywheel[gpu]'"),
        ({}, "'agentscope-flywheel[gpu]'"),
        ({"url": "file:///a%20b/flywheel", "dir_info": {}}, "'/a b/flywheel[gpu]'"),
        ({"url": "file:///a/flywheel", "dir_info": {"editable": True}}, "-e '/a/flywheel[gpu]'"),
        ({"url": "https://h/f.whl", "archive_info": {}}, "'agentscope-flywheel[gpu] @ https://h/f.whl'"),
        ({"url": "https://h/f", "vcs_info": {"vcs": "git"}}, "'agentscope-flywheel[gpu] @ git+https://h/f'"),
    ],
)
def test_more_of_it_is_installed_from_where_it_came(origin: Any, wanted: str) -> None:
    found = SimpleNamespace(read_text=lambda _: origin and json.dumps(origin))
    with pytest.MonkeyPatch.context() as during:
        during.setattr(metadata, "distribution", lambda _: found)
        assert own_package.requirement("gpu") == wanted


def test_without_metadata_the_name_is_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", fails)
    assert own_package.requirement() == "agentscope-flywheel"
