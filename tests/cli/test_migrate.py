"""`flywheel migrate`: rows of another program's file, and files for Flywheel that mean the same."""

from __future__ import annotations

import ast
import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, load
from flywheel.daemon.judging.judge_setup import judge_settings, rubric_of
from flywheel.daemon.migration import migrated, write
from flywheel.errors import ConfigError, ExportError
from flywheel.judge.filters.chain import Chain, chain_of
from flywheel.judge.grader import Grader
from flywheel.system.files import write_atomic
from flywheel.tuner.call import round_of
from tests.cli.conftest import Run
from tests.factories.config import write_yaml
from tests.factories.documented_json import compare, documented
from tests.factories.foreign_files import foreign_files
from tests.factories.judge_server import JudgeServer
from tests.sources.studio.writer import DATA, labels

GOOD = {each["answer"] for each in labels("old") if each["expected_verdict"] == "GOOD"}
EVALUATE: dict[str, Any] = {
    "type": "llm_evaluate",
    "enabled": True,
    "params": {"custom_rubrics": "1. Drop the task if the answer is wrong.\n2. Or rude.\n", "max_thread": 4},
}
DEDUPLICATION = {"type": "deduplication", "enabled": True, "params": {"db_path": "./.db", "model": None}}


def of_agentjet(root: str = "ajet", *, filters: Any = (), model: Any = "Qwen/Qwen3-0.6B", **below: Any) -> Any:
    """A configuration that reads `database.sqlite` beside it."""
    traced = {"base_url": "./database.sqlite", "train_output_path": "./tasks.jsonl", "filters": [*filters]}
    reader = {"type": "tracing", "feedback_tracing": traced}
    return {root: {"task_reader": reader, **({"model": {"path": model}} if model else {}), **below}}


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def effective(config: Config) -> dict[str, Any]:
    """Every setting but the files of rubric and chain, which are compared by what they hold."""
    made = config.model_dump(mode="json")
    del made["filter"]["chain"], made["filter"]["rubric"]
    return made


def hashes(config: Config) -> tuple[str, str]:
    """Of the rubric and of the judge."""
    chain = chain_of(config)
    grader = Grader(rubric_of(config, chain), judge_settings(config, chain))
    return grader.rubric.hash, grader.judge_hash


def decisions(config: Config) -> Any:
    """What a chain does, without its name and its texts."""
    chain = chain_of(config)
    if not isinstance(chain, Chain):
        return chain
    steps = [getattr(each, "name", type(each).__name__) for each in (*chain.before, *chain.after)]
    return steps, len(chain.before), chain.decides, chain.deduplication and chain.deduplication.similarity_threshold


def assert_same(file: Path, folder: Path) -> None:
    """Write what becomes of a file, and compare what both mean."""
    write(migrated(file, folder).files, folder)
    here, there = load(file), load(folder / "flywheel.yaml")
    assert effective(there) == effective(here)
    assert (hashes(there), decisions(there)) == (hashes(here), decisions(here))


def test_rows_are_printed_and_nothing_is_written_without_a_folder(flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "a.yaml", of_agentjet(rollout={"num_repeat": 6}, trainer_common={"total_epochs": 9}))
    ran = flywheel("migrate", "a.yaml", "--json")
    assert ran.code == 0, ran.err
    rows = {row["place"]: row for row in ran.json["rows"]}
    taken = rows["ajet.rollout.num_repeat"]
    assert (taken["outcome"], taken["use"]) == ("taken over", "training.group_size")
    assert rows["ajet.trainer_common.total_epochs"]["outcome"] == "without effect"
    assert (ran.json["program"], ran.json["written"], ran.json["forecast"]) == ("AgentJet", [], None)
    assert "database.sqlite" in ran.json["unread"][0]
    compare(ran.json, documented("migrate"), "migrate")
    text = flywheel("migrate", "a.yaml")
    assert (all(name in text.out for name in rows), text.err) == (True, ""), (
        "what has no effect is in the table alone"
    )
    assert "`training.steps` is the length of a round" in text.out
    assert names_in(tmp_path) == {"a.yaml"}


def test_a_missing_model_is_a_line_to_fill_in(flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "a.yaml", of_agentjet("astuner", model=None, filters=[EVALUATE]))
    ran = flywheel("migrate", "a.yaml", "--output", "made")
    assert (ran.code, "Fill in model.base in made/flywheel.yaml" in ran.out) == (1, True)
    assert "`astuner.model.path` is missing: nothing says which model is trained. Add it." in ran.out
    text = (tmp_path / "made" / "flywheel.yaml").read_text()
    assert "base: null # FILL IN" in text
    line = text[: text.index("FILL IN")].count("\n") + 1
    assert f"line {line}: `model.base`" in flywheel("config", "show", "-c", "made/flywheel.yaml").err
    (tmp_path / "made" / "flywheel.yaml").write_text(text.replace("base: null", "base: m"))
    assert load(tmp_path / "made" / "flywheel.yaml").model.base == "m"


def test_a_refused_row_has_its_remedy_and_nothing_is_written(flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "a.yaml", of_agentjet(backbone="verl", task_judge={"judge_type": "rubrics_auto_grader"}))
    ran = flywheel("migrate", "a.yaml", "--output", "made")
    assert (ran.code, (tmp_path / "made").exists()) == (1, False)
    assert "2 settings refused or missing:" in ran.out
    assert "flywheel export --format agentjet" in ran.out
    assert [*refused(flywheel)] == ["ajet.backbone", "ajet.task_judge.judge_type"]
    write_yaml(tmp_path / "own.yaml", {"sources": [], "training": {"steps": 3}})
    ran = flywheel("migrate", "own.yaml", "--json")
    assert (ran.code, "none of its keys is one of AgentJet" in ran.json["error"], ran.json.keys()) == (
        78,
        True,
        {"error"},
    )


def refused(flywheel: Run, *options: str, file: str = "a.yaml", code: int = 1) -> dict[str, Any]:
    """The refused rows of a file, by their places."""
    ran = flywheel("migrate", file, "--json", *options)
    assert ran.code == code, ran.out + ran.err
    return {row["place"]: row for row in ran.json["rows"] if row["outcome"] == "refused"}


@pytest.mark.parametrize("name", ["flywheel.yaml", "filters/agentjet.yaml", "rubrics/agentjet.yaml"])
def test_nothing_is_written_beside_a_target_that_exists(name: str, flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "a.yaml", of_agentjet(filters=[EVALUATE]))
    (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "made" / name).write_text("mine")
    flywheel("migrate", "a.yaml", "--output", "made").fails(1, f"cannot write made/{name}: it exists")
    assert names_in(tmp_path / "made") == {name}
    assert (tmp_path / "made" / name).read_text() == "mine"


def test_all_files_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_yaml(tmp_path / "a.yaml", of_agentjet(filters=[EVALUATE]))
    files, folder = migrated(tmp_path / "a.yaml", tmp_path / "made").files, tmp_path / "made"
    left = [2]

    def fails(path: Path, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write_atomic(path, data)

    monkeypatch.setattr("flywheel.daemon.migration.write_atomic", fails)
    with pytest.raises(ExportError, match="No space left"):
        write(files, folder)
    assert names_in(folder) == set()
    monkeypatch.undo()
    # What a process leaves that was killed before its last file.
    write({name: text for name, text in files.items() if name.startswith("rubrics")} | {"flywheel.yaml": ""}, folder)
    (folder / "flywheel.yaml").unlink()
    (folder / ".migrate-of-another").mkdir()
    write(files, folder)
    assert names_in(folder) == {"flywheel.yaml", "filters/agentjet.yaml", "rubrics/agentjet.yaml"}
    assert list(files)[-1] == "flywheel.yaml", "without it, no command uses the others"


@pytest.mark.parametrize("folder", ["there/below", "project", "project/made"])
def test_paths_mean_the_same_from_the_folder(folder: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "keep.py").write_text("def keep(task):\n    return True\n")
    (project / "pkg" / "flow.py").write_text("raise SystemExit('it was run')\n")
    filters = [{"type": "python", "params": {"path": "keep.py"}}, EVALUATE]
    raw = of_agentjet(
        model="./models/mine",
        filters=filters,
        rollout={"user_workflow": "pkg.flow->Flow"},
        task_judge={"judge_protocol": "pkg/judge.py->Judge"},
    )
    file = write_yaml(project / "pkg" / "a.yaml", raw | {"state": {"dir": "state"}})
    assert_same(file, tmp_path / folder)
    lines = (tmp_path / folder / "flywheel.yaml").read_text().splitlines()
    assert {line.split(":")[0].strip() for line in lines if str(tmp_path) in line} <= {"base"}, "adapters record it"


def test_the_text_has_what_the_file_sets_and_where_it_is_from(tmp_path: Path) -> None:
    raw = of_agentjet(filters=[EVALUATE, DEDUPLICATION], rollout={"num_repeat": 6})
    file = write_yaml(tmp_path / "a.yaml", raw | {"judge": {"base_url": "http://127.0.0.1:9/v1", "model": "j"}})
    files = migrated(file, tmp_path / "made").files
    text = files["flywheel.yaml"]
    assert list(yaml.safe_load(text)) == ["sources", "ingest", "judge", "filter", "model", "training", "rollout"]
    assert "  base: Qwen/Qwen3-0.6B # ajet.model.path\n" in text
    assert "  group_size: 6 # ajet.rollout.num_repeat\n" in text
    assert yaml.safe_load(text)["filter"] == {"chain": "filters/agentjet.yaml", "rubric": "rubrics/agentjet.yaml"}
    assert "custom_rubrics: |\n  1. Drop the task" in files["rubrics/agentjet.yaml"]
    chain = yaml.safe_load(files["filters/agentjet.yaml"])
    assert (chain["keep_order"], chain["decides"]) == (True, True)
    assert chain["filters"][0]["params"] == {"max_thread": 4, "temperature": 0.5}


def test_every_file_that_commands_accept_means_the_same_when_it_is_written(tmp_path: Path) -> None:
    accepted = 0
    for number, (name, raw) in enumerate(foreign_files()):
        file, folder = write_yaml(tmp_path / f"{number}.yaml", raw), tmp_path / "made" / str(number)
        try:
            load(file)
        except ConfigError:
            with contextlib.suppress(ConfigError):
                assert any(row.outcome == "refused" for row in migrated(file, folder).rows), name
            continue
        assert_same(file, folder)
        accepted += 1
    assert accepted > 100


@pytest.mark.parametrize("key", ["sk-0123456789abcdefghij", "${oc.env:MY_EMBEDDINGS}"])
def test_keys_are_neither_printed_nor_written(
    key: str, flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several variables with the same value, the one that the file names is written."""
    for name in ("OPENAI_API_KEY", "A_FIRST_ONE", "MY_EMBEDDINGS"):
        monkeypatch.setenv(name, "the-very-secret-one")
    entry = {"type": "deduplication", "params": {"model": "e", "base_url": "http://127.0.0.1:9/v1", "api_key": key}}
    raw = of_agentjet(filters=[entry], rollout={"user_workflow": "flow.py->Flow"}, other={"api_key": key})
    write_yaml(tmp_path / "a.yaml", raw)
    (tmp_path / "flow.py").write_text("")
    ran = [flywheel("migrate", "a.yaml", *options) for options in ([], ["--json"], ["--output", "made"])]
    out = "".join(each.out + each.err for each in ran)
    written = "".join((tmp_path / "made" / name).read_text() for name in names_in(tmp_path / "made"))
    for secret in ("sk-0123456789abcdefghij", "the-very-secret-one"):
        assert secret not in out + written
    variable = "MY_EMBEDDINGS" if "oc.env" in key else "OPENAI_API_KEY"
    assert f"api_key_env: {variable}" in written
    assert f"${variable}" in out


def test_ten_tasks_have_the_same_verdicts_and_calls_both_ways(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(DATA / "old.sqlite", tmp_path / "database.sqlite")
    rules = {"type": "rules", "params": {"min_answer_length": 30}}
    with JudgeServer(lambda _, answer: answer in GOOD) as judge:
        raw = of_agentjet(filters=[EVALUATE, rules, DEDUPLICATION])
        raw["judge"] = {"base_url": judge.base_url, "model": "judge", "max_attempts": 1}
        file = write_yaml(tmp_path / "a.yaml", raw)
        assert flywheel("migrate", file, "--output", "made").code == 0

        def filtered(config: Path, home: str, *options: str) -> tuple[dict[str, Any], int]:
            monkeypatch.setenv("FLYWHEEL_HOME", str(tmp_path / home))
            before = judge.calls
            assert flywheel("ingest", "-c", config).code == 0
            ran = flywheel("filter", "-c", config, "--limit", "10", "--json", *options)
            assert ran.code == 0, ran.err
            verdicts = {each["task_id"]: (each["outcome"], each["score"]) for each in ran.json["verdicts"]}
            (tmp_path / "tasks.jsonl").unlink()
            return verdicts, judge.calls - before

        here = filtered(file, "one")
        assert len(here[0]) == 10
        assert {outcome for outcome, _ in here[0].values()} == {"accepted", "rejected"}
        assert filtered(tmp_path / "made" / "flywheel.yaml", "two") == here
        monkeypatch.setenv("FLYWHEEL_HOME", str(tmp_path / "one"))
        again = flywheel("filter", "-c", "made/flywheel.yaml", "--rejudge", "--dry-run", "--json").json
        assert again["due"] == 96 - 10, "what was judged with the file is judged"


def test_the_forecast_follows_where_no_row_is_refused(flywheel: Run, tmp_path: Path) -> None:
    shutil.copy(DATA / "old.sqlite", tmp_path / "database.sqlite")
    write_yaml(tmp_path / "a.yaml", of_agentjet())
    before = names_in(tmp_path)
    ran = flywheel("migrate", "a.yaml")
    assert "96 tasks: 37 held out; of 59 for training 59 usable." in ran.out
    assert names_in(tmp_path) == before
    write_yaml(tmp_path / "a.yaml", of_agentjet(backbone="verl"))
    assert flywheel("migrate", "a.yaml", "--json").json["forecast"] is None


SAGE = """
from sage.agent import AgentSFTConfig, rl
from pathlib import Path

open("it-was-run", "w")
CONFIG = AgentSFTConfig(base_model="Qwen/Qwen2.5-1.5B-Instruct", num_epochs=2, output_dir=Path.home() / "out"{more})
RL = rl.RLTrainingConfig(algorithm="dpo", dpo_config={{"beta": 0.2}})
"""


def test_a_python_file_is_parsed_and_never_run(flywheel: Run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SAGE.format(more=""))
    ran = flywheel("migrate", "a.py", "--output", "made")
    assert ran.code == 0, ran.out + ran.err
    assert not (tmp_path / "it-was-run").exists()
    config = load(tmp_path / "made" / "flywheel.yaml")
    assert (config.model.base, config.training.sft.epochs) == ("Qwen/Qwen2.5-1.5B-Instruct", 2)
    assert config.training.dpo.beta == 0.2
    (tmp_path / "a.py").write_text(SAGE.format(more=", seed=int(3)"))
    ran = flywheel("migrate", "a.py", "--json")
    (row,) = [row for row in ran.json["rows"] if row["outcome"] == "refused"]
    assert (ran.code, row["place"], row["hint"]) == (1, "sft_config.seed", "Write its value.")
    assert "int(3)" in row["why"]


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ('sft_config=AgentSFTConfig(), rl_config=RLTrainingConfig(algorithm="dpo")', ["sft", "dpo"]),
        ('rl_config=RLTrainingConfig(algorithm="grpo")', ["sft", "grpo"]),
        ('run_sft=False, sft_config=AgentSFTConfig(), rl_config=RLTrainingConfig(algorithm="dpo")', ["dpo"]),
        ("sft_config=AgentSFTConfig(), run_rl=False", ["sft"]),
        ("", ["sft", "dpo"]),
        ("rl_config=here)\nhere = RLTrainingConfig(", ["sft", "dpo"]),
    ],
)
def test_a_class_without_options_is_a_stage_all_the_same(options: str, stages: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"TrainingPipelineConfig({options})")
    write(migrated(tmp_path / "a.py", tmp_path / "made").files, tmp_path / "made")
    assert load(tmp_path / "made" / "flywheel.yaml").training.stages == stages


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "AgentSFTConfig('m')",
        "AgentSFTConfig(seed=1)\nAgentSFTConfig(seed=2)",
        "def (",
        "\0",
        f"x = {'-' * 100_000}1",
        f"x = a{'.a' * 100_000}()",
    ],
)
def test_a_python_file_that_says_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot migrate .*a\.py: it "):
        migrated(tmp_path / "a.py")


@pytest.mark.parametrize(
    "change", ["c.num_epochs = 7", "c.num_epochs += 4", "c.num_epochs: int = 7", "c.tags[0] = 7"]
)
def test_an_option_that_changes_after_its_call_is_refused(change: str, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    text = "c = AgentSFTConfig(base_model='m', num_epochs=3, lora_target_modules=['q'])\n"
    change = change.replace("tags", "lora_target_modules")
    file.write_text(text + change)
    with pytest.raises(ConfigError, match=r"line 2: `c\.(num_epochs|lora_target_modules)` is set after the call"):
        migrated(file)
    file.write_text(text + "c.mine = 7\nself.num_epochs = 7\n")
    assert migrated(file).config is not None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("f(api_key='sk-abcdef0123456789abcdef')", "f(api_key='[secret]')"),
        ("f('sk-abcdef0123456789abcdef', 3, key='q')", "f('[secret]', 3, key='q')"),
        ("f({'token': 'mine', 'at': x}, password=['a'])", "f({'token': '[secret]', 'at': x}, password=['[secret]'])"),
        ("f(api_key=env('MY_API_KEY'), token=e['A_TOKEN'])", "f(api_key=env('MY_API_KEY'), token=e['A_TOKEN'])"),
        ("f(f'sk-abcdef0123456789abcdef{x}', q=b'x')", "f(f'[secret]{x}', q=b'x')"),
        ("{[1]: 2}", "{[1]: 2}"),  # which no Python could make
    ],
)
@pytest.mark.parametrize("option", ["optim", "base_model"])
def test_an_expression_is_shown_without_keys(
    flywheel: Run, tmp_path: Path, value: str, shown: str, option: str
) -> None:
    (tmp_path / "a.py").write_text(f"AgentSFTConfig({option}={value})")
    for ran in (flywheel("migrate", "a.py"), flywheel("migrate", "a.py", "--json")):
        assert "sk-abc" not in ran.out + ran.err and "'mine'" not in ran.out
    (row,) = [row for row in migrated(tmp_path / "a.py").rows if row.place == f"sft_config.{option}"]
    assert row.value == shown
    assert option == "optim" or (row.outcome == "refused" and shown in row.why)


def test_a_file_of_trinity_becomes_a_program_with_the_same_round(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.jsonl", "flow.py", "eval.jsonl"):
        (tmp_path / name).write_text("")
    raw = {
        "project": "mine",
        "model": {"model_path": "${oc.env:A_MODEL}", "max_model_len": 9000},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 6, "optimizer": {"lr": 1e-6}},
        "buffer": {
            "batch_size": 16,
            "explorer_input": {
                "taskset": {"path": "train.jsonl", "format": {"prompt_key": "q"}},
                "eval_tasksets": [{"path": "eval.jsonl"}],
            },
        },
        "explorer": {"rollout_model": {"engine_num": 4}},
        "monitor": {"monitor_args": {"api_key": "hidden-by-all-means"}},
    }
    monkeypatch.setenv("A_MODEL", "org/model")
    monkeypatch.setattr("flywheel.config.foreign.gpus_of_machine", lambda: 8)
    file = write_yaml(tmp_path / "trinity.yaml", raw)
    ran = flywheel("migrate", file, "--output", "made")
    assert ran.code == 0, ran.out + ran.err
    assert "no forecast: the file names no database" in ran.out
    assert "hidden-by-all-means" not in ran.out + (tmp_path / "made" / "tune.py").read_text()
    tree = ast.parse((tmp_path / "made" / "tune.py").read_text())
    (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    given = {"workflow_func": "flow.py:run"}
    made, python = tmp_path / "round", Path("/usr/bin/python3")
    here, there = (
        round_of(given | each, made, python) for each in ({"config_path": file}, {"config": ast.literal_eval(value)})
    )
    assert there.settings == here.settings
    assert (there.epochs, here.epochs) == (1, 1)
    assert {**here.train, "path": str(tmp_path / "train.jsonl")} == there.train
    assert [each["path"] for each in there.held_out] == [str(tmp_path / "eval.jsonl")]


def test_a_command_line_is_translated_with_its_file(flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "a.yaml", of_agentjet())
    ran = flywheel("migrate", "ajet --conf a.yaml --backbone debug", "--output", "made", "--json")
    assert ran.code == 0, ran.out + ran.err
    assert ran.json["commands"] == ["flywheel round --debug -c made/flywheel.yaml"]
    assert {"--conf", "--backbone", "ajet.model.path"} <= {row["place"] for row in ran.json["rows"]}
    assert ran.json["written"] == ["made/flywheel.yaml"]
    for text in ("ajet --backbone debug", "ajet --conf a.yaml --swarm-server"):
        ran = flywheel("migrate", text, "--output", "other")
        assert (ran.code, ran.err, (tmp_path / "other").exists()) == (1, "", False), text
    for given, said in (("nothing.yaml", "there is no such file"), ("ls -l", "cannot")):
        flywheel("migrate", given).fails(78, said)


def test_a_command_line_with_a_file_of_trinity_is_its_program(flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "t.yaml", OF_TRINITY)
    ran = flywheel("migrate", "ajet --conf t.yaml", "--output", "my tuner", "--json")
    assert (ran.code, ran.json["written"]) == (0, ["my tuner/tune.py"])
    assert ran.json["unread"] == ["the file names no database"]
    assert ran.json["commands"] == ["python 'my tuner/tune.py' WORKFLOW.py:FUNCTION"]
    assert flywheel("migrate", "ajet --conf t.yaml", "--json").json["commands"] == [
        "flywheel migrate t.yaml --output DIR",
        "python DIR/tune.py WORKFLOW.py:FUNCTION",
    ]
    for command in (["run", "--once"], ["ingest"], ["config", "show"]):
        flywheel(*command, "-c", "t.yaml").fails(78, "flywheel migrate t.yaml --output DIR")


def test_the_backbone_of_a_command_line_counts(flywheel: Run, tmp_path: Path) -> None:
    root = "astuner"
    write_yaml(tmp_path / "a.yaml", of_agentjet(root, backbone="verl"))
    ran = flywheel("migrate", f"{root} --conf a.yaml --backbone debug", "--json")
    (row,) = [row for row in ran.json["rows"] if row["place"] == f"{root}.backbone"]
    assert (ran.code, row["value"], row["why"]) == (0, "verl", "`--backbone` counts")
    (line,) = ran.json["commands"]
    assert line == f"flywheel round --debug -c a.yaml --set {root}.backbone=null"
    ran = flywheel("migrate", f"{root} --conf a.yaml --backbone verl", "--output", "made", "--json")
    assert (ran.code, ran.json["commands"]) == (0, ["flywheel run -c made/flywheel.yaml"])
    for options in (line.split()[3:], ["-c", "made/flywheel.yaml"]):
        assert flywheel("config", "show", *options).code == 0
    assert [*refused(flywheel, file=f"{root} --conf a.yaml")] == [f"{root}.backbone"]


def test_what_the_file_asks_of_engines_is_written_whatever_this_machine_has(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.config.foreign.gpus_of_machine", lambda: 1)
    of_trinity = OF_TRINITY | {"explorer": {"rollout_model": {"engine_num": 4}}}
    for name, raw in (("tune.py", of_trinity), ("flywheel.yaml", of_agentjet(rollout={"n_vllm_engine": 4}))):
        write_yaml(tmp_path / "a.yaml", raw)
        ran = flywheel("migrate", "a.yaml", "--output", name.partition(".")[0])
        assert (ran.code, ran.err) == (0, ""), ran.out
        assert "also if this machine has fewer GPUs" in ran.out
    assert "'engines': 4" in (tmp_path / "tune" / "tune.py").read_text()
    assert load(tmp_path / "a.yaml").rollout.engines == 1
    assert load(tmp_path / "flywheel" / "flywheel.yaml").rollout.engines == 4


def test_a_wrong_value_has_the_name_that_the_file_gives_it(flywheel: Run, tmp_path: Path) -> None:
    base_url = {"ajet": {"model": {"path": "m"}, "feedback_tracing": {"base_url": 3}}}
    for raw, place, ours in (
        ({"sft_config": {"num_epochs": "many", "base_model": "m"}}, "sft_config.num_epochs", "training.sft.epochs"),
        (of_agentjet(rollout={"num_repeat": "many"}), "ajet.rollout.num_repeat", "training.group_size"),
        (of_agentjet(model=["m"]), "ajet.model.path", "model.base"),
        (base_url, "ajet.feedback_tracing.base_url", "sources.0.path"),
    ):
        write_yaml(tmp_path / "a.yaml", raw)
        (row,) = refused(flywheel, "--output", "made").values()
        assert not (tmp_path / "made").exists()
        assert (row["place"], f"`{place}`" in row["why"], ours in row["why"]) == (place, True, False)
        ran = flywheel("config", "show", "-c", "a.yaml")
        assert (ran.code, f"`{place}`" in ran.err, ours in ran.err) == (78, True, False)
    write_yaml(tmp_path / "a.yaml", of_agentjet(rollout={"num_repeat": "many", "temperature": -1}))
    assert [(place, row["why"].count("`ajet.")) for place, row in refused(flywheel).items()] == [
        ("ajet.rollout.num_repeat", 1),
        ("ajet.rollout.temperature", 1),
    ]
    write_yaml(tmp_path / "a.yaml", of_agentjet() | {"training": {"steps": "many"}})
    ran = flywheel("migrate", "a.yaml")
    assert (ran.code, "`training.steps`" in ran.err) == (78, True), "one of Flywheel's own has its name"


def test_a_rule_about_two_settings_refuses_both_with_the_whole_reason(tmp_path: Path) -> None:
    chosen = {"use_coreset_selection": True, "coreset_target_size": 9}
    raw = {"run_warmup": True, "run_rl": False, "sft_config": {"base_model": "m", **chosen}}
    write_yaml(tmp_path / "a.yaml", raw)
    refused = migrated(tmp_path / "a.yaml").refused
    assert {row.use for row in refused} == {"training.stages", "training.coreset"}
    for row in refused:
        assert "it is for stages [sft]; use diversity or random" in row.why and "(stages is `run" in row.why


def test_what_a_file_of_trinity_lacks_is_a_line_to_fill_in(flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "t.yaml", {"algorithm": {"repeat_times": 4}, "buffer": {"batch_size": 2}})
    ran = flywheel("migrate", "t.yaml", "--output", "made")
    assert ran.code == 1, ran.out
    assert "`model.model_path` is missing: nothing says which model is trained. Add it." in ran.out
    assert "`buffer.explorer_input.taskset.path` is missing: nothing says where the tasks are. Add it." in ran.out
    assert "Fill in model.base in made/tune.py." in ran.out
    text = (tmp_path / "made" / "tune.py").read_text()
    assert 'SETTINGS["model"]["base"] = None  # FILL IN' in text
    names: dict[str, Any] = {"__name__": "of_a_test"}
    for value in ("m", "t.jsonl"):
        text = text.replace("= None  # FILL IN", f"= {value!r}  #", 1)
    exec(text, names)
    made = round_of({"workflow_func": "f.py:run", "config": names["SETTINGS"]}, tmp_path, Path("/usr/bin/python3"))
    assert (made.settings.model.base, made.train["path"]) == ("m", "t.jsonl")
    write_yaml(tmp_path / "t.yaml", {"algorithm": {"repeat_times": 4}, "mode": "train"})
    ran = flywheel("migrate", "t.yaml", "--output", "other")
    assert (ran.code, (tmp_path / "other").exists()) == (1, False)


def test_a_chain_that_cannot_be_read_is_refused(flywheel: Run, tmp_path: Path) -> None:
    write_yaml(tmp_path / "a.yaml", of_agentjet(filters=[EVALUATE, DEDUPLICATION, EVALUATE]))
    found = refused(flywheel, "--output", "made")
    assert not (tmp_path / "made").exists()
    why = {place: row["why"] for place, row in found.items()}
    assert why == {"ajet.task_reader.feedback_tracing.filters": "`filters.2.type`: llm_evaluate is there already"}
    write_yaml(tmp_path / "a.yaml", of_agentjet(filters=[EVALUATE, EVALUATE | {"enabled": False}]))
    assert flywheel("migrate", "a.yaml", "--output", "made").code == 0


def test_the_key_on_of_a_notice_is_no_truth_value_and_a_variable_without_a_secret_is_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "http://127.0.0.1:9/v1")
    (tmp_path / "a.yaml").write_text(
        "ajet: {model: {path: m}, feedback_tracing: {base_url: a}}\n"
        "notify: [{name: a, on: [promoted], url: 'http://127.0.0.1:9/'}]\n"
        "judge: {base_url: '${oc.env:WHERE}', api_key_env: MINE}\nserving: {extra_args: [--seed, '3']}\n"
    )
    text = migrated(tmp_path / "a.yaml", tmp_path / "made").files["flywheel.yaml"]
    assert ("'on':" in text, "true:" in text) == (True, False)
    assert "base_url: http://127.0.0.1:9/v1" in text and "api_key_env: MINE" in text


def in_filter(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """A base with a secret in a parameter of a filter."""
    return of_agentjet(filters=[entry | {"params": entry["params"] | {name: f"https://bob:{HIDDEN}@j.example/v1"}}])


TRACED: dict[str, Any] = {"ajet": {"model": {"path": "m"}, "feedback_tracing": {"base_url": "a"}}}
OF_TRINITY: dict[str, Any] = {
    "model": {"model_path": "m"},
    "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
}
HIDDEN = "hidden-by-all-means"
OF_SAGE: dict[str, Any] = {"sft_config": {"base_model": "m"}}


@pytest.mark.parametrize(
    ("own", "places", "variable"),
    [
        ({"judge": {"base_url": "https://bob:${oc.env:PW}@j.example/v1"}}, ["judge.base_url"], "$PW"),
        ({"judge": {"base_url": f"https://{HIDDEN}@j.example/v1"}}, ["judge.base_url"], ""),
        ({"notify": [{"on": ["promoted"], "url": "${oc.env:HOOK}"}]}, ["notify.0.url"], "$HOOK"),
        ({"notify": "${mine}", "mine": [{"on": ["promoted"], "url": "${oc.env:HOOK}"}]}, ["notify.0.url"], ""),
        ({"notify": [{"on": ["promoted"], "command": ["a", "--token=" + HIDDEN]}]}, ["notify.0.command"], ""),
        (
            {"serving": {"extra_args": ["--api-key", HIDDEN]}, "judge": {"api_key": f"sk-{HIDDEN}"}},
            ["judge.api_key", "serving.extra_args"],
            "",
        ),
        ({"serving": {"extra_args": ["--api-key", "${oc.env:PW}"]}}, ["serving.extra_args"], "$PW"),
    ],
)
def test_secrets_of_flywheels_own_sections_are_neither_printed_nor_written(
    own: Any, places: list[str], variable: str, flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PW", HIDDEN)
    monkeypatch.setenv("HOOK", f"https://hooks.example/{HIDDEN}")
    # Nothing is filled in in files of SAGE's.
    for base in (TRACED, OF_TRINITY) if "${" in str(own) else (TRACED, OF_TRINITY, OF_SAGE):
        write_yaml(tmp_path / "a.yaml", base | own)
        ran = flywheel("migrate", "a.yaml", "--json", "--output", "made")
        assert HIDDEN not in ran.out + ran.err
        rows = {row["place"]: row for row in ran.json["rows"] if row["outcome"] == "refused"}
        assert (ran.code, [*rows], (tmp_path / "made").exists()) == (1, places, False)
        assert rows[places[0]]["value"] == (variable or "[secret]")
        assert "_env`" in rows[places[0]]["hint"]
    assert HIDDEN not in flywheel("migrate", "a.yaml").out
    for name, entry in (("base_url", DEDUPLICATION | {"params": {"model": "e"}}), ("custom_rubrics", EVALUATE)):
        write_yaml(tmp_path / "a.yaml", in_filter(entry, name))
        ran = flywheel("migrate", "a.yaml", "--output", "made")
        assert (ran.code, (tmp_path / "made").exists(), HIDDEN in ran.out + ran.err) == (1, False, False)
        assert f"filters.0.params.{name}" in ran.out


def test_a_row_has_the_variable_in_a_value_as_it_is_written(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKEY", HIDDEN)
    path = f"{tmp_path}/${{oc.env:SKEY}}.jsonl"
    (tmp_path / f"{HIDDEN}.jsonl").write_text("")
    taskset = {"path": path, "split": "dev"}
    inputs = {"taskset": taskset, "eval_tasksets": [taskset]}
    reader = {"type": "jsonl_dataset_file", "jsonl_dataset_file": {"training": {"file_path": path}}}
    for raw, places in (
        ({"ajet": {"model": {"path": "m"}, "task_reader": reader}}, 1),
        ({"model": {"model_path": "m"}, "buffer": {"explorer_input": inputs}}, 2),
    ):
        write_yaml(tmp_path / "a.yaml", raw)
        for option in ("--json", "--output=made"):
            ran = flywheel("migrate", "a.yaml", option)
            assert HIDDEN not in ran.out.split("forecast")[0], ran.out
        rows = [row for row in flywheel("migrate", "a.yaml", "--json").json["rows"] if path in str(row["value"])]
        assert (len(rows), all(path in str(row["made"]) for row in rows)) == (places, True)
        assert any(HIDDEN in text for text in migrated(tmp_path / "a.yaml", tmp_path / "made").files.values())
