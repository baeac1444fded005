"""What was judged can be found and read: `tasks` by state, adapter, criterion and text, `show` and `why` by any id,
and by what `status` says that replies are rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel.records.round import Sampling, SystemPrompt
from tests.cli.conftest import Run
from tests.cli.filter_bench import Bench
from tests.factories.config import write_config
from tests.factories.documented_json import compare, documented
from tests.factories.round import suite
from tests.factories.state import execute
from tests.factories.trace import write_lines
from tests.web.recorded_state import unpack

GOOD, BAD, UNBOXED = "good: \\boxed{1}", "bad: \\boxed{0}", "bad, without a box"


def ids(bench: Bench, *arguments: str) -> list[str]:
    return [task["query"] for task in bench("tasks", *arguments, "--json").json["tasks"]]


@pytest.fixture
def judged(bench: Bench) -> Bench:
    bench.lines(GOOD, BAD, UNBOXED)
    bench.filter()
    bench.lines("waits")
    assert bench("ingest").code == 0
    return bench


@pytest.mark.slow
def test_tasks_are_found_by_state_adapter_criterion_and_text(judged: Bench) -> None:
    execute(judged.folder / "state" / "state.db", "UPDATE tasks SET adapter = 'agent@r0001' WHERE id = 1")
    everything = ["What is 3 plus 1?", "What is 2 plus 1?", "What is 1 plus 1?", "What is 0 plus 1?"]
    assert ids(judged) == everything, "the newest first"
    assert ids(judged, "--state", "rejected") == everything[1:3]
    assert ids(judged, "--criterion", "boxed") == everything[1:2]
    assert ids(judged, "--criterion", "correct") == everything[1:3]
    assert ids(judged, "--adapter", "r0001") == ids(judged, "--adapter", "agent@r0001") == everything[3:]
    assert ids(judged, "--adapter", "unrecorded") == everything[:3]
    assert ids(judged, "--adapter", "0001") == []
    assert ids(judged, "--text", "WITHOUT A BOX") == everything[1:2]
    assert ids(judged, "--text", "is 1 plus") == everything[2:3]
    assert ids(judged, "--text", "%") == []
    assert ids(judged, "--state", "rejected", "--text", "0 plus") == []


def test_a_list_tells_state_score_failed_criteria_and_an_excerpt(judged: Bench) -> None:
    lines = judged("tasks").out.splitlines()
    assert lines[-1] == "4"
    [told] = [line for line in lines if "2 plus 1" in line]
    for part in ("a-task-with-a-long-name-2", "rejected", "0.00", "boxed, correct, clear", "→ bad, without a box"):
        assert part in told
    assert "pending" in next(line for line in lines if "3 plus 1" in line)
    assert judged("tasks", "--limit", "2").out.splitlines()[-1] == "2 of 4; --limit N shows more"
    assert judged("tasks", "--state", "rejected").out.splitlines()[-1] == "2 rejected"


def test_a_task_is_shown_whole_with_reasons(judged: Bench) -> None:
    [task] = judged("tasks", "--criterion", "boxed", "--json").json["tasks"]
    text = judged("show", task["task_id"]).out
    order = [
        "rejected (",
        "Question\n  What is 2 plus 1?",
        "Answer\n  bad, without a box",
        "Verdict\n  rejected, score 0.00",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "✗ boxed: no  the pattern is not found" in text
    assert "✗ correct: no  it is not so" in text
    [shown] = judged("show", task["task_id"], "--json").json["tasks"]
    assert shown["verdict"]["score"] == 0.0
    assert [each["criterion"] for each in shown["verdict"]["criteria"] if not each["passed"]] == [
        "boxed",
        "correct",
        "clear",
    ]
    assert "not judged yet" in judged("show", "a-task-with-a-long-name-3").out
    ran = judged("show", "t-nothing")
    assert ran.code == 1
    assert "cannot show t-nothing" in ran.err


def test_a_row_that_is_no_task_is_shown_by_the_name_that_its_file_gives_it(bench: Bench) -> None:
    rows = {"task_id": "sum-1", "main_query": "1+1?", "answer": "2"}, {"task_id": "sum-2", "main_query": "2+2?"}
    write_lines(bench.folder / "source.jsonl", *rows)
    assert bench("ingest").code == 0
    shown, why = bench("show", "sum-2"), bench("why", "sum-2")
    assert (shown.code, shown.out) == (0, why.out)
    assert shown.out.startswith("row sum-2 of trace ")
    assert bench("show", "sum-2", "--json").json == bench("why", "sum-2", "--json").json
    assert bench("why", "sum-1").out.startswith("row sum-1 of trace ")
    assert [task["task_id"] for task in bench("show", "sum-1", "--json").json["tasks"]] == ["sum-1"]


def test_steps_and_history_are_shown(flywheel: Run, tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    line = {
        "messages": [
            {"role": "system", "content": "You add.\x1b[2J"},
            {"role": "user", "content": "1+1?"},
            {**call, "content": None},
            {"role": "tool", "name": "add", "content": "two"},
            {"role": "assistant", "content": "2"},
        ]
    }
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    config = {"state": {"dir": "state"}, "sources": [{"type": "jsonl", "path": "lines.jsonl"}]}
    (tmp_path / "flywheel.yaml").write_text(json.dumps(config))
    assert flywheel("ingest").code == 0
    [task] = flywheel("tasks", "--json").json["tasks"]
    text = flywheel("show", task["task_id"]).out
    assert "History\n  [system] You add." in text
    assert "\x1b" not in text
    assert 'Steps\n  [assistant calls add] {"a": 1}\n  [tool add] two' in text


@pytest.mark.slow
def test_status_tells_by_what_replies_are_rejected(judged: Bench) -> None:
    told = judged("status", "--json").json
    compare(told, documented("status"), "status")
    assert told["recent_verdicts"] == {
        "judged": 3,
        "accepted": 1,
        "rejected_by": {"clear": 2, "correct": 2, "boxed": 1},
    }
    assert told["warnings"] == []
    assert "rejected by 2 clear, 2 correct, 1 boxed" in judged("status").out
    assert 'flywheel_recent_rejections{criterion="correct"} 2.0' in judged("status", "--metrics").out


@pytest.mark.slow
def test_a_judge_that_accepts_nothing_is_a_loud_warning(bench: Bench) -> None:
    bench.lines(*[BAD] * 49)
    bench.filter()
    assert bench("status", "--json").json["warnings"] == []
    bench.lines(BAD)
    ran = bench("filter")
    assert ran.code == 0
    warning = "none of the last 50 judged replies was accepted (not met: correct 50, clear 50)"
    assert warning in ran.err
    assert bench("status").out.startswith("WARNING")
    assert warning in " ".join(bench("status").out.split())
    bench.lines(GOOD)
    assert "none of the last" not in bench("filter").err
    assert bench("status", "--json").json["warnings"] == []


def test_how_the_rollouts_of_a_round_were_made_and_suites_beside_the_criteria(tmp_path: Path, flywheel: Run) -> None:
    state = unpack(tmp_path)
    config = write_config(tmp_path, model={"alias": state.model.alias})
    assert "temperature" not in flywheel("why", "r0001", "-c", config).out
    prompts = [SystemPrompt(text=f"Add.\n\x1b[2J{'x' * 400}", rollouts=704), SystemPrompt(text="", rollouts=64)]
    sampling = Sampling(
        temperature=0.8, steps=12, prompts=8, group_size=8, system_prompts=prompts, further_system_prompts=1
    )
    suites = json.dumps([suite("math", -0.2).model_dump()])
    for path, value in (("$.sampling", sampling.model_dump_json()), ("$.comparison.suites", suites)):
        patch = f"UPDATE rounds SET result = json_set(result, '{path}', json(?)) WHERE name = 'r0001'"
        execute(state.state_dir / "state.db", patch, value)
    told = flywheel("why", "r0001", "-c", config).out.splitlines()
    assert "  suite math: 0.800 → 0.600 on 20 tasks, gain -0.200 (-0.240 … -0.160)" in told
    start = told.index("rollouts: 12 steps × 8 prompts × 8 rollouts, temperature 0.8")
    assert told[start + 1].startswith("system prompt of 704 rollouts: Add.")
    assert "\x1b" not in told[start + 1] and len(told[start + 1]) < 400
    assert told[start + 2 : start + 4] == ["system prompt of 64 rollouts: (none)", "and 1 further system prompt"]
    story = json.loads(flywheel("why", "r0001", "-c", config, "--json").out)
    compare(story, documented("why ROUND"), "why")
    assert story["sampling"] == sampling.model_dump()
    assert story["comparison"]["suites"] == json.loads(suites)
    for name in ("r0001", f"{state.model.alias}@r0001"):
        assert flywheel("show", name, "-c", config) == flywheel("why", "r0001", "-c", config)
        assert flywheel("show", name, "-c", config, "--json").json == story


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
