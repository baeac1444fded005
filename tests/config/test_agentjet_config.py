"""What is read of a configuration made for AgentJet or ASTuner, and what is refused."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config import agentjet
from flywheel.config.file import Config, load
from flywheel.config.ingest import DatasetSettings, JsonlSource, ModelFilter, StudioSource
from flywheel.config.section import merged
from flywheel.config.training import AgentProgramSettings
from flywheel.config.translation import translate
from flywheel.daemon.judging.judge_setup import rubric_of
from flywheel.errors import ConfigError
from flywheel.judge.client import endpoints_of
from flywheel.judge.filters.chain import chain_of, load_chain
from flywheel.records.exclusion import Exclusion
from flywheel.system.process import gpus_of_machine
from tests.cases import for_each
from tests.factories.foreign_files import EFFECTS, MODEL, SECTION


def read(folder: Path, raw: Any) -> Config:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


@pytest.mark.parametrize("root", ["ajet", "astuner", "task_reader", ""])
def test_both_roots_a_bare_reader_and_a_bare_section_are_the_same(root: str, tmp_path: Path) -> None:
    inner: dict[str, Any] = {"task_reader": {"type": "tracing", "feedback_tracing": SECTION}}
    inner = {"": {"feedback_tracing": SECTION}, "task_reader": inner}.get(root, {root: inner})
    raw = {**inner, "model": MODEL}
    config = read(tmp_path, raw)
    (source,) = config.sources
    assert isinstance(source, StudioSource)
    assert source.path == Path("~/AgentScope-Studio/database.sqlite").expanduser()
    assert config.task_file == tmp_path / "tasks.jsonl"
    assert (config.judge.model, config.judge.max_tokens) == ("qwen3-235b", 2048)
    assert config.filter.chain == tmp_path / "config.yaml"
    chain = load_chain(config.filter.chain)
    assert chain.judge is not None
    assert "\\boxed{}" in str(chain.judge.custom_rubrics), "braces survive"
    assert chain.deduplication is None, "switched off"


def unused_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The keys without effect, of the one line of the log that has them."""
    (line,) = (message for message in caplog.messages if " without effect: " in message)
    return line.partition(" without effect: ")[2].removesuffix("; see `flywheel docs migrate`").split(", ")


def test_one_line_of_the_log_lists_the_keys_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = {
        "ajet": {
            "task_reader": {"feedback_tracing": SECTION, "jsonl": {"training": {"file_path": "a"}}},
            "trainer_common": {"total_epochs": 3, "optim": {"lr": 1e-6}, "logger": ["console", "swanlab"]},
            "rollout": {
                "val_kwargs": {"top_k": 3},
                "num_repeets": 4,
                "mode": None,
                "compute_madness_checklist": ["wrong_toolcall", "nonsense"],
            },
            "model": {"path": "m", "dtype": "bf16"},
        },
        "hydra": {"searchpath": []},
        "trinity": {"synchronizer": {"sync_offset": 1}},
        "maze": {"size": 4},
        "state": {"dir": "own"},
    }
    with caplog.at_level(logging.WARNING):
        config = read(tmp_path, raw)
    assert config.state_dir == tmp_path / "own"
    assert set(unused_in(caplog)) == {
        "hydra.searchpath", "trinity.synchronizer.sync_offset", "maze.size", "ajet.trainer_common.total_epochs",
        "ajet.trainer_common.logger swanlab", "ajet.rollout.compute_madness_checklist wrong_toolcall",
        "ajet.task_reader.jsonl.training.file_path", "ajet.model.dtype",
        "ajet.rollout.val_kwargs.top_k", "ajet.rollout.num_repeets (did you mean rollout.num_repeat?)",
    }  # fmt: skip


@pytest.mark.parametrize(("settings", "key", "expected"), EFFECTS, ids=str)
def test_a_key_has_effect(settings: dict[str, Any], key: str, expected: Any, tmp_path: Path) -> None:
    below = {"model": {"path": "m"}, "task_reader": {"feedback_tracing": {"base_url": "x"}}}
    found: Any = read(tmp_path, {"ajet": merged(below, settings)})
    for part in key.split("."):
        found = getattr(found, part)
    if isinstance(expected, str):
        found, expected = str(found), expected.format(root=tmp_path)
    assert found == expected


def test_an_adapter_is_agentjets_where_it_trains_one() -> None:
    found = agentjet.rows_of(
        {"ajet": {"lora": {"lora_rank": 0, "lora_alpha": 8, "load_format": "auto", "other": 1}}}, None
    )
    rows = {row.place: row.why for row in found if row.place.startswith("ajet.lora")}
    assert set(rows) == {f"ajet.lora.{name}" for name in ("lora_rank", "lora_alpha", "load_format", "other")}
    assert "`training.lora`" in rows["ajet.lora.lora_rank"]
    assert "`training.lora`" in rows["ajet.lora.other"]
    assert rows["ajet.lora.lora_alpha"] == rows["ajet.lora.lora_rank"]


def translated(settings: dict[str, Any], **own: Any) -> Any:
    raw = {"ajet": {"model": {"path": "m"}, "feedback_tracing": {}, **settings}, **own}
    found = translate(raw, None)
    found.check("use a.yaml", "a.yaml")
    return found.settings


@pytest.mark.parametrize(
    ("logger", "expected"),
    [
        pytest.param("tensorboard", ["tensorboard"], marks=pytest.mark.training),
        ("mlflow", ["mlflow"]),
        (["console", "wandb", "swanlab"], ["wandb"]),
        ("swanlab", []),
        (3, []),
    ],
)
def test_the_loggers_that_there_are(logger: Any, expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    """SwanLab is not installed here."""
    assert translated({"trainer_common": {"logger": logger}})["tracking"] == {"report_to": expected}
    assert ("ajet.trainer_common.logger swanlab" in caplog.text) == ("swanlab" in str(logger))


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        ((2, 4), 0, (1, 1)),
        ((2, 4), 1, (1, 1)),
        ((2, 4), 2, (1, 1)),
        ((2, 4), 3, (1, 2)),
        ((2, 4), 4, (1, 2)),
        ((2, 4), 5, (1, 4)),
        ((2, 4), 8, (1, 4)),
        ((2, 4), 9, (2, 4)),
        ((4, 1), 3, (2, 1)),
        ((4, 1), 1, (1, 1)),
        ((1, 3), 3, (1, 1)),
        ((1, 3), 4, (1, 3)),
    ],
)
def test_engines_and_gpus_of_each_are_as_many_as_fit(
    asked: tuple[int, int], gpus: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("flywheel.config.foreign.gpus_of_machine", lambda: gpus)
    rollout = {"n_vllm_engine": asked[0], "tensor_model_parallel_size": asked[1]}
    with caplog.at_level(logging.WARNING):
        made = translated({"rollout": rollout})["rollout"]
    assert (made.get("engines", 1), made.get("tensor_parallel", 1)) == expected
    assert len(caplog.records) == (expected != asked)
    made = translated({"rollout": rollout}, ray={"address": "10.0.0.1:6379"})["rollout"]
    assert (made.get("engines", 1), made.get("tensor_parallel", 1)) == asked, "the cluster's GPUs are not known here"


def test_gpus_are_those_that_are_there_and_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = len([*Path("/dev").glob("nvidia[0-9]*")])
    assert gpus_of_machine() == here
    for visible, expected in (("", 0), ("-1", 0), ("1", 1), ("0, 2", 2), ("0,1,2,3", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus_of_machine() == min(expected, here)


def of(**settings: Any) -> dict[str, Any]:
    return {"ajet": {"model": {"path": "m"}, "feedback_tracing": {}, **settings}}


def reading(kind: str | None, **reader: Any) -> dict[str, Any]:
    return {"ajet": {"model": {"path": "m"}, "task_reader": {**({"type": kind} if kind else {}), **reader}}}


NO_MODEL = "is missing: nothing says which model is trained"
TRACED = {"feedback_tracing": SECTION}


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (of(backbone="verl"), "`ajet.backbone`.*flywheel export"),
        (of(backbone="trinity"), "`ajet.backbone`.*flywheel export"),
        (of(task_judge={"judge_type": "of_mine"}), "`ajet.task_judge.judge_type`.*Set it to customized_protocol"),
        (of(task_judge={"judge_type": "rubrics_auto_grader"}), "`ajet.task_judge.judge_type`.*filter.rubric"),
        (
            of(task_judge={"judge_protocol": "a->B"}),
            "`ajet.task_judge.judge_protocol` judges a workflow's answers.*rollout.user_workflow",
        ),
        (
            reading(None, feedback_tracing={"alien_llm_modell": "x"}),
            "unknown key `ajet.task_reader.feedback_tracing.alien_llm_modell`",
        ),
        (reading("tracing"), "`ajet.feedback_tracing` is missing"),
        ({"task_reader": {"type": "tracing"}, "model": MODEL}, "`feedback_tracing` is missing"),
        ({"task_reader": {"type": "jsonl"}, "model": MODEL}, "`task_reader.jsonl.training.file_path` is missing"),
        (reading("huggingface_dat_repo"), "`ajet.task_reader.huggingface_dat_repo.dataset_path` is missing"),
        (reading("jsonl"), "`ajet.task_reader.jsonl.training.file_path` is missing"),
        (reading("of_mine"), "`ajet.task_reader.type` is of_mine, which Flywheel does not"),
        (reading("env_service", **TRACED), "`ajet.task_reader.type` is env_service, which Flywheel does not"),
        (reading("data_generation", **TRACED), "`ajet.task_reader.type` is data_generation, which Flywheel does not"),
        ({**TRACED, "model": MODEL, "judge": "abc"}, "`judge`: it must be a mapping"),
        ({**TRACED, "model": MODEL, "ingest": [1]}, "`ingest`: it must be a mapping"),
        ({**TRACED, "model": MODEL, "filter": 3}, "`filter`: it must be a mapping"),
        (TRACED, f"`model.base` {NO_MODEL}"),
        ({**TRACED, "model": {"alias": "a"}}, f"`model.base` {NO_MODEL}"),
        ({"ajet": {**TRACED, "rollout": {"num_repeat": 4}}}, f"`ajet.model.path` {NO_MODEL}"),
        ({"astuner": {**TRACED, "model": {"path": None}}}, f"`astuner.model.path` {NO_MODEL}"),
        ({"astuner": {**TRACED, "model": {"path": ""}}}, f"`astuner.model.path` {NO_MODEL}"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_to_use(raw: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, raw)


def test_the_judge_and_the_embeddings_are_at_dashscope(tmp_path: Path) -> None:
    section = copy.deepcopy(SECTION)
    params = section["filters"][1] = {"type": "deduplication", "params": {"model": "text-embedding-v4"}}
    judge = read(tmp_path, {"feedback_tracing": section, "model": MODEL}).judge
    assert judge.base_url == "https://dashscope.aliyuncs.com/compatible-mode/v1"
    assert (judge.api_key_env, judge.model) == ("DASHSCOPE_API_KEY", "qwen3-235b")
    assert judge.backup is not None
    assert endpoints_of(judge)[1].base_url == judge.base_url
    assert judge.backup.api_key_env == "DASHSCOPE_API_KEY_BACKUP"
    found = load_chain(tmp_path / "config.yaml").deduplication
    assert found is not None
    assert (found.base_url, found.api_key_env) == (judge.base_url, "DASHSCOPE_API_KEY")
    assert found.backup_api_key_env == "DASHSCOPE_API_KEY_BACKUP"
    params["params"]["base_url"] = "http://127.0.0.1:9/v1"
    own = {"base_url": "http://127.0.0.1:8/v1"}
    judge = read(tmp_path, {"feedback_tracing": section, "model": MODEL, "judge": own}).judge
    assert (judge.base_url, judge.api_key_env, judge.backup) == (own["base_url"], "OPENAI_API_KEY", None)
    found = load_chain(tmp_path / "config.yaml").deduplication
    assert found is not None
    assert (found.base_url, found.api_key_env) == ("http://127.0.0.1:9/v1", "OPENAI_API_KEY")


@pytest.mark.parametrize(
    ("root", "value", "shown"),
    [("ajet", 3, "3"), ("astuner", "x", "x"), ("ajet", [1], "a list"), ("astuner", None, "empty")],
)
def test_a_root_that_is_no_mapping_is_named(tmp_path: Path, root: str, value: Any, shown: str) -> None:
    beside = {root: value, "feedback_tracing": SECTION, "model": MODEL}
    for raw in ({root: value}, beside) if value is not None else ({root: value},):
        with pytest.raises(ConfigError, match=rf"use .*: `{root}` is {shown}, not a mapping\. Correct it\. See"):
            read(tmp_path, raw)


def test_an_empty_root_says_nothing_beside_the_other(tmp_path: Path) -> None:
    for empty, root in (("ajet", "astuner"), ("astuner", "ajet")):
        raw = {root: {"task_reader": {"feedback_tracing": SECTION}}, "model": MODEL}
        assert read(tmp_path, {empty: None, **raw}) == read(tmp_path, raw)


@pytest.mark.parametrize(
    ("given", "path", "file"),
    [
        ("openai/gsm8k", "openai/gsm8k", "openai-gsm8k"),
        ("./data/gsm8k", "{root}/data/gsm8k", "data-gsm8k"),
        ("/mnt/sets/gsm8k/main", "/mnt/sets/gsm8k/main", "mnt-sets-gsm8k-main"),
    ],
)
def test_both_splits_of_a_data_set_are_sources(tmp_path: Path, given: str, path: str, file: str) -> None:
    hub = {"dataset_path": given, "training_split": "train", "validation_split": "test"}
    reader = {"type": "huggingface_dat_repo", "huggingface_dat_repo": hub}
    raw = {"ajet": {"model": {"path": "m"}, "task_reader": reader}, "state": {"dir": str(tmp_path / "state")}}
    config = read(tmp_path, raw)
    found = [(each.split, each.dataset, each.path) for each in config.sources if isinstance(each, JsonlSource)]
    assert found == [
        (
            side,
            DatasetSettings(path=path.format(root=tmp_path), split=name),
            tmp_path / "state" / "datasets" / f"{file}-{name}.jsonl",
        )
        for side, name in (("train", "train"), ("held-out", "test"))
    ]


def test_defaults_are_theirs(tmp_path: Path) -> None:
    config = read(tmp_path, {"feedback_tracing": {}, "model": MODEL})
    assert config.sources == [StudioSource(models=ModelFilter(include=["*"]))]
    assert (config.ingest.train_ratio, config.ingest.split_seed, config.filter.chain) == (0.7, 42, None)


def taken(config: Config) -> tuple[Any, ...]:
    """What such a file says of replies of other models, inexact prompts and uncalled tools."""
    models = [each.models.include for each in config.sources]
    return models, config.training.inexact_prompts, config.rollout.tools.uncalled


@pytest.mark.parametrize("root", ["ajet", "astuner", ""])
def test_what_that_program_uses_is_used(root: str, tmp_path: Path) -> None:
    inner = {"feedback_tracing": SECTION}
    raw = {root: {"task_reader": {"type": "tracing", **inner}}} if root else inner
    config = read(tmp_path, raw | {"model": MODEL})
    assert taken(config) == ([["*"]], "use", "use")
    assert {Exclusion.HIDDEN, Exclusion.INEXACT, Exclusion.UNCALLED} <= config.takes.train.exclusions
    assert config.models_of(config.sources[0]).trains("gpt-4o-mini", "")
    assert config.assumed == (
        "as in AgentJet, where the file sets nothing: replies of every model count (sources[].models.include: ['*']);"
        " tasks without an exact prompt are used (training.inexact_prompts: use); tasks whose tools were not called"
        " are used (rollout.tools.uncalled: use); replies are sent to the judge qwen3-235b at"
        " https://dashscope.aliyuncs.com/compatible-mode/v1 (judge.base_url)"
    )
    judge = {"base_url": "http://127.0.0.1:9/v1"}
    assert "judge" not in read(tmp_path, raw | {"model": MODEL, "judge": judge}).assumed
    own = read(tmp_path, {"model": MODEL})
    assert (taken(own), own.assumed) == (([[]], "leave-out", "leave-out"), "")


@pytest.mark.parametrize(
    ("own", "expected", "unsaid"),
    [
        ({"training": {"inexact_prompts": "leave-out"}}, ([["*"]], "leave-out", "use"), "training.inexact_prompts"),
        ({"training": {"seed": 1}}, ([["*"]], "use", "use"), ""),
        ({"rollout": {"tools": {"uncalled": "leave-out"}}}, ([["*"]], "use", "leave-out"), "rollout.tools.uncalled"),
        ({"rollout": {"tools": {"on_miss": "error"}}}, ([["*"]], "use", "use"), ""),
        ({"sources": [{"path": "a", "models": {"include": []}}]}, ([[]], "use", "use"), "sources[].models.include"),
        (
            {"sources": [{"path": "a", "models": {"include": ["b"]}}, {"path": "c"}]},
            ([["b"], ["*"]], "use", "use"),
            "",
        ),
        ({"sources": [{"path": "a", "models": {"exclude": ["b"]}}]}, ([["*"]], "use", "use"), ""),
    ],
    ids=str,
)
def test_what_the_file_sets_itself_holds(
    own: dict[str, Any], expected: tuple[Any, ...], unsaid: str, tmp_path: Path
) -> None:
    config = read(tmp_path, {"feedback_tracing": SECTION, "model": MODEL, **own})
    assert taken(config) == expected
    keys = {"sources[].models.include", "training.inexact_prompts", "rollout.tools.uncalled"}
    assert {key for key in keys if key in config.assumed} == keys - {unsaid}


def test_a_reader_that_is_no_mapping_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"ajet": {"task_reader": 5, "feedback_tracing": {}}, "model": MODEL}).sources


@pytest.mark.parametrize("kind", ["jsonl", "jsonl_dataset_file"])
@pytest.mark.parametrize("section", [None, SECTION])
def test_a_reader_of_lines_is_honoured(kind: str, section: Any, tmp_path: Path) -> None:
    reader = {"type": kind, kind: {"training": {"file_path": "train.jsonl"}}}
    if section is not None:
        reader["feedback_tracing"] = section
    config = read(tmp_path, {"ajet": {"model": {"path": "m"}, "task_reader": reader}})
    (source,) = config.sources
    assert isinstance(source, JsonlSource)
    assert source.path == tmp_path / "train.jsonl"
    assert config.judge.model == ("qwen3-235b" if section else "qwen3-235b-a22b-instruct-2507")


def test_the_builtin_reasons_are_judged_beside_the_text(tmp_path: Path) -> None:
    config = read(tmp_path, {"feedback_tracing": SECTION, "model": MODEL})
    rubric = rubric_of(config)
    *reasons, flat = rubric.every
    assert (flat.id, flat.required, len(reasons)) == ("custom_rubrics", True, 7)
    assert all(reason.required and reason.asks_the_judge for reason in reasons)
    for failed in rubric.every:
        assert rubric.score({each.id: float(each.id != failed.id) for each in rubric.every}) == 0
    off = copy.deepcopy(SECTION)
    off["filters"][0]["params"]["builtin"] = False
    config = read(tmp_path, {"feedback_tracing": off, "model": MODEL})
    assert [each.id for each in rubric_of(config).every] == ["custom_rubrics"]


@for_each("key", ["user_workflow", "agentscope_workflow", "agentscope_learn_protocol"])
def test_the_names_of_a_workflow_and_the_settings_that_it_gets(tmp_path: Path, key: str) -> None:
    raw = {
        "astuner": {
            "task_reader": {"type": "tracing", "feedback_tracing": SECTION},
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "rollout": {key: "agents.sums->Sums", "multi_turn": {"max_steps": 5}},
        },
        "board": {"size": 4, "api_key": "abc", "keys": ["sk-0123456789abcdefghij"], "token": 7},
        "warmup": {"moves": 3},
        "seed": 5,
        "judge": {"model": "ours"},
    }
    agent = read(tmp_path, raw).rollout.agent
    assert isinstance(agent, AgentProgramSettings)
    assert agent.workflow == "agents.sums->Sums"
    assert agent.config == {
        "ajet": raw["astuner"],
        "board": {"size": 4, "api_key": None, "keys": [None], "token": 7},
        "warmup": {"moves": 3},
        "seed": 5,
    }


def test_a_judge_may_judge_a_command(tmp_path: Path) -> None:
    raw = of(task_judge={"judge_protocol": "agents.sums->Right"})
    rollout = read(tmp_path, {**raw, "rollout": {"agent": {"command": ["node", "agent.mjs"]}}}).rollout
    assert (rollout.reward_function, rollout.weights.workflow) == ("agents.sums->Right", 1)


def project(workflow: str = "", judge: str = "", **more: Any) -> dict[str, Any]:
    """A file whose relative paths are all of those that there are."""
    filters = [
        {"type": "python", "params": {"path": "./filters/mine.py", "function": "keep"}},
        {"type": "deduplication", "params": {"db_path": "./.similarity"}},
    ]
    section = {"base_url": "./data/db.sqlite", "train_output_path": "data/tasks.jsonl", "filters": filters}
    names = {"user_workflow": workflow} if workflow else {}
    judged = {"judge_protocol": judge} if judge else {}
    below = {"model": {"path": "./models/mine"}, "rollout": names, "task_judge": judged}
    return {"ajet": {**below, "task_reader": {"type": "tracing", "feedback_tracing": section}}, **more}


@pytest.mark.parametrize(
    ("files", "raw", "cwd", "root", "why"),
    [
        (["tutorial/one/train.py"], project("tutorial.one.train->W"), "", "", "where tutorial/ is"),
        (["tutorial/one/train.py"], project("tutorial/one/train.py->W"), "elsewhere", "", "where tutorial/ is"),
        (["tutorial/one/train.py"], project("./tutorial/one/train.py->W"), "tutorial/one", "", "where tutorial/ is"),
        (["tutorial/x"], project("tutorial.missing->W"), "elsewhere", "", "where tutorial/ is"),
        (["mine.py"], project("mine->W"), "elsewhere", "", "where mine.py is"),
        (["tutorial/one/mine.py", "mine.py"], project("mine->W"), "", "tutorial/one", "where mine.py is"),
        (["lib/judge.py"], project("installed.agent->W", "lib.judge->J"), "elsewhere", "", "where lib/ is"),
        # An output of a run from the wrong folder has the package's name.
        (
            ["tutorial/one/train.py", "tutorial/one/tutorial/one/tasks.jsonl"],
            project("tutorial.one.train->W"),
            "elsewhere",
            "",
            "where tutorial/ is",
        ),
        # The databases of other folders do not count.
        (
            ["tutorial/one/train.py", "tutorial/one/data/db.sqlite", "elsewhere/data/db.sqlite"],
            project("tutorial.one.train->W"),
            "elsewhere",
            "",
            "where tutorial/ is",
        ),
        ([], project(), "", "", "the working directory"),
        ([], project(), "tutorial", "tutorial", "the working directory"),
        ([], project(), "tutorial/one", "tutorial/one", "the working directory"),
        ([], project(), "elsewhere", "tutorial/one", "the folder of the configuration"),
        ([], project("installed.agent->W"), "", "", "the working directory"),
        ([], project("~/agent.py->W", "/opt/judge.py->J"), "elsewhere", "tutorial/one", "the folder of"),
        (["tutorial/one/data/db.sqlite"], project(), "", "", "the working directory"),
        (
            ["agents/a.py"],
            project(rollout={"agent": {"workflow": "agents/a.py:run"}}),
            "elsewhere",
            "",
            "where agents/ is",
        ),
    ],
)
def test_every_relative_path_starts_at_the_project_root(
    files: list[str], raw: Any, cwd: str, root: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("elsewhere/x", "tutorial/one/x", *files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / cwd)
    file = tmp_path / "tutorial" / "one" / "one.yaml"
    file.write_text(yaml.safe_dump(raw))
    folder = tmp_path / root
    for name in (file, Path(os.path.relpath(file, tmp_path / cwd))):
        config = load(name)
        assert config.project is not None
        assert config.project.folder == folder
        assert config.project.why.startswith(why)
        (source,) = config.sources
        assert isinstance(source, StudioSource)
        assert (source.path, config.task_file) == (folder / "data/db.sqlite", folder / "data/tasks.jsonl")
        assert config.model.base == str(folder / "models/mine")
        if isinstance(config.rollout.agent, AgentProgramSettings):
            assert config.rollout.agent.folder == folder
        (folder / "filters").mkdir(exist_ok=True)
        (folder / "filters" / "mine.py").write_text("def keep(task):\n    return True\n")
        chain = chain_of(config)
        assert chain is not None
        assert any(str(folder / ".similarity") in notice for notice in chain.notices)
        (folder / "filters" / "mine.py").unlink()


def test_a_service_that_starts_in_the_root_directory_has_the_files_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    config = read(tmp_path, project())
    assert config.project is not None
    assert config.project.folder == tmp_path


def test_flywheels_own_files_start_at_their_folder(tmp_path: Path) -> None:
    config = read(tmp_path, {"sources": [{"path": "a.sqlite"}]})
    assert config.project is None
