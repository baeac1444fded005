"""`flywheel why` of a round."""

from __future__ import annotations

import json
from pathlib import Path

from flywheel.records.round import Sampling, SystemPrompt
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.round import suite
from tests.factories.state import execute
from tests.web.recorded_state import unpack


def test_how_the_rollouts_of_a_round_were_made(tmp_path: Path, flywheel: Run) -> None:
    state = unpack(tmp_path)
    config = write_config(tmp_path, model={"alias": state.model.alias})
    assert "temperature" not in flywheel("why", "r0001", "-c", config).out
    sampling = Sampling(
        temperature=0.8,
        steps=12,
        prompts=8,
        group_size=8,
        system_prompts=[
            SystemPrompt(text=f"Add.\n\x1b[2J{'x' * 400}", rollouts=704),
            SystemPrompt(text="", rollouts=64),
        ],
        further_system_prompts=1,
    )
    patch = "UPDATE rounds SET result = json_set(result, '$.sampling', json(?)) WHERE name = 'r0001'"
    execute(state.state_dir / "state.db", patch, sampling.model_dump_json())
    told = flywheel("why", "r0001", "-c", config).out.splitlines()
    start = told.index("rollouts: 12 steps × 8 prompts × 8 rollouts, temperature 0.8")
    assert told[start + 1].startswith("system prompt of 704 rollouts: Add.")
    assert "\x1b" not in told[start + 1] and len(told[start + 1]) < 400
    assert told[start + 2 : start + 4] == ["system prompt of 64 rollouts: (none)", "and 1 further system prompt"]
    story = json.loads(flywheel("why", "r0001", "-c", config, "--json").out)
    assert story["sampling"] == sampling.model_dump()


def test_suites_are_shown_beside_the_criteria(tmp_path: Path, flywheel: Run) -> None:
    state = unpack(tmp_path)
    config = write_config(tmp_path, model={"alias": state.model.alias})
    suites = json.dumps([suite("math", -0.2).model_dump()])
    database = state.state_dir / "state.db"
    for table, path in (("rounds SET result", "$.comparison.suites"), ("adapters SET comparison", "$.suites")):
        column = table.rpartition(" ")[2]
        execute(database, f"UPDATE {table} = json_set({column}, '{path}', json(?)) WHERE name = 'r0001'", suites)
    told = flywheel("why", "r0001", "-c", config).out.splitlines()
    assert "  suite math: 0.800 → 0.600 on 20 tasks, gain -0.200 (-0.240 … -0.160)" in told
    story = json.loads(flywheel("why", "r0001", "-c", config, "--json").out)
    assert story["comparison"]["suites"] == json.loads(suites)
