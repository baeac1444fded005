"""The pages of rounds whose tasks were erased still work, and have nothing of them."""

from __future__ import annotations

import json
import re

from flywheel.config.file import Config
from flywheel.daemon.rounds.removal import erase_from_results, erase_from_round
from flywheel.training.data.rollout_file import groups
from tests.factories.state import execute, in_thread, open_state
from tests.factories.web import client


async def _erase_from_state(config: Config, keys: set[str]) -> None:
    async with open_state(config.state_dir) as store:
        await store.write(erase_from_results, keys)


def test_the_pages_of_a_round_without_its_erased_tasks(own_state: Config) -> None:
    directory = own_state.state_dir / "rounds" / "r0001"
    spec = json.loads((directory / "spec.json").read_bytes())
    asked = {task["task_id"]: task["query"] for task in (*spec["train"], *spec["held_out"])}
    before = list(groups(directory))
    scores = json.loads((directory / "result.json").read_bytes())["comparison"]["scores"]
    gone = {before[0].task_id, scores[0]["task_id"]}
    assert erase_from_round(directory, gone) > 0
    keys = ", ".join(f"'{task}'" for task in gone)
    execute(
        own_state.state_dir / "state.db", f"UPDATE tasks SET state = 'erased', payload = '{{}}' WHERE key IN ({keys})"
    )
    in_thread(_erase_from_state(own_state, gone))

    pages = client(own_state)
    left = [group for group in before if group.task_id not in gone]
    [group] = [group for group in left if (group.step, group.group) == (left[0].step, left[0].group)]
    paths = (
        "/rounds", "/rounds/r0001", "/rounds/r0002", "/rollouts/r0001",
        f"/rollouts/r0001/{group.step}-{group.group}", "/gate/r0001",
    )  # fmt: skip
    shown = {}
    for path in paths:
        response = pages.get(path)
        assert response.status_code == 200, path
        shown[path] = response.text
    assert not [path for path, text in shown.items() for task in gone if asked[task] in text]
    assert len(list(groups(directory))) == len(left) < len(before)
    assert asked[group.task_id] in shown[f"/rollouts/r0001/{group.step}-{group.group}"]
    sentence = "trained on texts that were erased since (1 of 67 samples, 1.5%)"
    assert sentence in re.sub(r"\s+", " ", shown["/rounds/r0001"])
    assert "it goes on from adapters that were" in shown["/rounds/r0002"]
