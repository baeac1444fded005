"""`flywheel why` and `flywheel show` of a round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel.records.round import Sampling, SystemPrompt
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.documented_json import compare, documented
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
    compare(story, documented("why ROUND"), "why")
    assert story["sampling"] == sampling.model_dump()
    for name in ("r0001", f"{state.model.alias}@r0001"):
        assert flywheel("show", name, "-c", config) == flywheel("why", "r0001", "-c", config)
        assert flywheel("show", name, "-c", config, "--json").json == story


def test_suites_are_shown_beside_the_criteria(tmp_path: Path, flywheel: Run) -> None:
    state = unpack(tmp_path)
    config = write_config(tmp_path, model={"alias": state.model.alias})
    suites = json.dumps([suite("math", -0.2).model_dump()])
    database = state.state_dir / "state.db"
    changed = "UPDATE rounds SET result = json_set(result, '$.comparison.suites', json(?)) WHERE name = 'r0001'"
    execute(database, changed, suites)
    told = flywheel("why", "r0001", "-c", config).out.splitlines()
    assert "  suite math: 0.800 → 0.600 on 20 tasks, gain -0.200 (-0.240 … -0.160)" in told
    story = json.loads(flywheel("why", "r0001", "-c", config, "--json").out)
    assert story["comparison"]["suites"] == json.loads(suites)


@pytest.mark.slow
def test_it_is_said_what_was_trained_on_texts_that_were_erased(tmp_path: Path, flywheel: Run) -> None:
    state = unpack(tmp_path)
    config = write_config(tmp_path, model={"alias": state.model.alias})
    assert flywheel("why", "r0002", "-c", config, "--json").json["erased"] is None
    assert not [text for text in flywheel("status", "-c", config, "--json").json["warnings"] if "erased" in text]
    of_first = "SELECT task_id FROM round_samples WHERE round_id = 1 AND split = 'train' LIMIT 2"
    execute(state.state_dir / "state.db", f"UPDATE tasks SET state = 'erased' WHERE id IN ({of_first})")
    first, second = (flywheel("why", name, "-c", config, "--json").json["erased"] for name in ("r0001", "r0002"))
    assert (first["erased"], first["samples"], first["inherited_share"]) == (2, 67, 0)
    assert (second["erased"], second["inherited_erased"], second["serves_as"]) == (0, 2, [state.model.alias])
    assert second["sentence"] in flywheel("why", "r0002", "-c", config).out.splitlines()
    warnings = flywheel("status", "-c", config, "--json").json["warnings"]
    assert second["sentence"] in warnings and first["sentence"] not in warnings, "the first does not serve"
    assert any("is the base model: `flywheel rollback --to base`" in text for text in warnings)
    assert "2 erased" in flywheel("audit", "-c", config).out
