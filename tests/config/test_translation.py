"""Translations of other programs' files: which are accepted, what their rows show, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.config.translation import translate
from tests.factories.foreign_files import foreign_files

FILES = dict(foreign_files())


def test_most_files_are_accepted() -> None:
    refused = [name for name, raw in FILES.items() if translate(raw, None).refused]
    assert (len(FILES) > 150, len(refused) < 10) == (True, True), refused


KEY = "sk-of-nobody-at-all-012345"


@pytest.mark.parametrize("is_variable", [True, False])
def test_no_row_has_a_key_and_one_from_the_environment_is_its_variable(
    is_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_USER", KEY if is_variable else "")
    filters = [{"type": "deduplication", "params": {"model": "e", "api_key": KEY}}]
    below = {"feedback_tracing": {"filters": filters}, "model": {"path": "m"}, "board": {"api_key": KEY, "size": 4}}
    agent = {"rollout": {"user_workflow": "a->B"}, "more": [KEY, {"password": "x"}]}
    aux = {"explorer": {"auxiliary_models": [{"api_key": KEY}]}, "service": {"token": KEY}, "buffer": {}}
    for raw in ({"ajet": below | agent}, {"astuner": below}, aux):
        rows = translate(raw, Path("/nowhere/x.yaml")).rows
        assert KEY not in repr(rows)
        (shown,) = (row.value for row in rows if row.place.rpartition(".")[2] in ("api_key", "token"))
        assert shown == ("$OF_THE_USER" if is_variable else "[secret]")
    (row,) = (row for row in translate({"ajet": below | agent}, None).rows if row.use == "rollout.agent.config")
    assert row.made["ajet"]["board"] == {"api_key": None, "size": 4}
