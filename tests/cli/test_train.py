"""`flywheel train`: options become settings, the adapter arrives where it is asked for, and errors are named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flywheel
from flywheel.cli.train import STAGES
from flywheel.daemon import file_round
from flywheel.daemon.stage_round import FILES, SHORT
from flywheel.records.round import AdapterRef, RoundResult
from flywheel.training.data.round_directory import identity_of, read_spec
from flywheel.training.data.round_progress import read_steps
from flywheel.training.data.tracking import figures_of
from tests.cli.conftest import Ran, Run
from tests.daemon.rounds.workers import REFUSES, works
from tests.factories.commands import root
from tests.factories.config import BOXED_RUBRIC, make_config
from tests.factories.documented_json import compare, documented
from tests.factories.round import POLICY
from tests.factories.tracker import READERS, same

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": str(2 * n)},
        ]
    }
    for n in range(12)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in CHATS))
    return path


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says what runs in the worker's place; it leaves an adapter until then."""
    monkeypatch.setattr(file_round, "PACKAGES", ())
    work = partial(works, tmp_path, monkeypatch)
    made = tmp_path / "out.round" / "adapter"
    adapter = AdapterRef(name="sft", path=str(made), sha256="0")
    result = RoundResult(round_id="sft", outcome="trained", adapter=adapter, steps=3).model_dump_json()
    measured = [{"event": "step", "step": 1, "loss": loss, "held_out_loss": loss + 1} for loss in (2.0, 1.5)]
    metrics = "\n".join(map(json.dumps, measured))
    files = f"echo x > $3/adapter/weights; echo '{metrics}' > $3/metrics.jsonl"
    work(f"mkdir $3/adapter; {files}\necho '{result}' > $3/result.json")
    return work


def spec(folder: Path) -> Any:
    return json.loads((folder / "out.round" / "spec.json").read_text())


@pytest.fixture
def train(flywheel: Run, tmp_path: Path, data: Path) -> Callable[..., Ran]:
    """Trains on the conversations, into `out`."""
    return lambda stage, *options: flywheel("train", stage, "--data", data, "--output", "out", *options)


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_options_are_settings_and_the_adapter_is_copied(flywheel: Run, tmp_path: Path, data: Path) -> None:
    (tmp_path / "more.yaml").write_text(json.dumps({"training": {"lora": {"r": 8}, "sft": {"epochs": 9}}}))
    options = ("--epochs", 3, "--batch-size", 2, "--learning-rate", 0.001, "--max-length", 128, "-c", "more.yaml")
    options += ("--warmup", 0.1, "--task-weights", "no_tools=2,one_tool=1.5", "--seed", 7)
    ran = flywheel("train", "sft", "--base-model", "org/model", "--data", data, "--output", "out", *options)
    assert ran.code == 0, ran.err
    assert (tmp_path / "out" / "weights").read_text() == "x\n"
    told = ran.out.splitlines()
    assert told[0].endswith("out: adapter after 3 steps of sft")
    assert told[1:3] == ["loss 2.000 → 1.500", "loss on held-out replies 3.000 → 2.500"]
    assert told[3] == "not compared with the starting model: there is no rubric to grade answers"
    made = spec(tmp_path)
    training = made["settings"]["training"]
    assert (made["base_model"], made["parent"], made["test"], made["rubric"]) == ("org/model", None, None, {})
    assert training["stages"] == ["sft"]
    names = ("epochs", "batch_size", "learning_rate", "warmup_steps")
    assert [training["sft"][name] for name in names] == [3, 2, 0.001, 0.1]
    assert (training["task_weights"], made["seed"]) == ({"no_tools": 2, "one_tool": 1.5}, 7)
    assert (training["lora"]["r"], made["settings"]["rollout"]["max_model_len"]) == (8, 128)
    assert len(made["train"]) + len(made["held_out"]) == 12


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_a_round_goes_on_from_an_adapter_on_its_base_model(train: Callable[..., Ran], tmp_path: Path) -> None:
    parent = tmp_path / "first"
    parent.mkdir()
    (parent / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/other"}))
    (parent / "adapter_model.safetensors").write_bytes(b"")
    options = ("--steps", 5, "--num-samples", 4, "--beta", 0.1, "--batch-size", 2, "--learning-rate", 0.001)
    judge = ("--set", "judge.base_url=http://127.0.0.1:9/v1", "--set", "judge.model=m")
    ran = train("grpo", "--sft-model", "first", "--rubric", BOXED_RUBRIC, *options, *judge)
    assert ran.code == 0, ran.err
    made = spec(tmp_path)
    training = made["settings"]["training"]
    assert (made["base_model"], made["parent"]["path"]) == ("org/other", str(parent))
    names = ("stages", "steps", "group_size", "beta", "prompts_per_step", "learning_rate")
    assert [training[name] for name in names] == [["grpo"], 5, 4, 0.1, 2, 0.001]
    assert (made["rubric"]["id"], made["test"]["number"]) == ("math-boxed", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_rollouts_are_made_for_no_task_that_is_held_out(flywheel: Run, tmp_path: Path, data: Path) -> None:
    held = [{"seed": 9, "level": None, "map": "é"}, *CHATS[:8]]
    lines = [*CHATS, {"map": "\u00e9", "seed": 9}, {"map": "é", "seed": 10}]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held))
    data.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    (tmp_path / "flow.py").write_text("async def run(task, model):\n    return 1.0\n")
    (tmp_path / "flywheel.yaml").write_text(
        "rollout: {agent: {workflow: flow.py:run}, reward: {rubric: 0, workflow: 1}}"
    )
    files = ("--base-model", "m", "--data", data, "--eval-data", "held.jsonl", "--output", "out")
    ran = flywheel("train", "grpo", *files, "-c", "flywheel.yaml")
    assert ran.code == 0, ran.err
    made = spec(tmp_path)
    assert [task["line"].get("seed") for task in made["train"]] == [None] * 4 + [10]
    assert sorted(made["left_out"].values()) == [
        f"it begins as line {number} of held.jsonl does, which is held out" for number in range(1, 10)
    ]


def test_each_command_has_the_options_of_its_stage() -> None:
    commands = root().commands["train"].commands  # type: ignore[attr-defined]
    for at, stage in enumerate(STAGES):
        named = {each.name for each in commands[stage].params}
        short = {name for name, keys in SHORT.items() if keys[at] or name == "epochs"}
        assert named == {"data", "as_json", "given", *FILES, *short}


def ends_with(result: RoundResult) -> str:
    return f"echo '{result.model_dump_json()}' > $3/result.json"


TOO_LONG = "it has {} tokens, and rollout.max_model_len is 512"


@pytest.mark.slow
def test_what_became_of_each_row_is_said(
    flywheel: Run, tmp_path: Path, data: Path, work: Callable[[str], None]
) -> None:
    rows = [{"task_id": f"r{n}", **line} for n, line in enumerate((*CHATS, CHATS[3]), 1)]
    data.write_text("".join(json.dumps(line) + "\n" for line in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps(CHATS[0] | {"task_id": "h1"}) + "\n")
    held_out = "it begins as line 1 of held.jsonl does, which is held out"
    result = RoundResult(
        round_id="sft",
        outcome="trained",
        adapter=AdapterRef(name="sft", path=str(tmp_path / "out.round" / "adapter"), sha256="0"),
        left_out={
            "r1": held_out,
            "r4": "its prompt is that of r13",
            **{f"r{n}": TOO_LONG.format(f"1,87{n}") for n in (9, 8, 6)},
        },
        partly={f"r{n}": "its reasoning: the chat template writes none" for n in (2, 5)},
        steps=3,
    )
    work(f"mkdir $3/adapter; touch $3/adapter/weights $3/metrics.jsonl; {ends_with(result)}")
    files = ("--base-model", "m", "--data", data, "--eval-data", "held.jsonl")
    ran = flywheel("train", "sft", *files, "--output", "out")
    told = ran.out.splitlines()
    at = told.index("14 rows: 8 trained on, 1 held out, 5 left out")
    assert told[at + 1 : at + 5] == [
        f"left out: 3 rows, the first is line 6 of {data}: {TOO_LONG.format('1,876')}",
        f"left out: 1 row, the first is line 1 of {data}: {held_out}",
        f"left out: 1 row, the first is line 4 of {data}: its prompt is that of r13",
        f"note: 2 rows, the first is line 2 of {data}: its reasoning: the chat template writes none",
    ]
    assert f"1 row, the first is line 1 of {data}: {held_out}" in ran.err
    assert "more rows were skipped" not in ran.err
    more = {f"r{n}": TOO_LONG.format(900 + n) for n in range(2, 14)}
    work(ends_with(RoundResult(round_id="sft", outcome="refused", reason="none of 13 tasks", left_out=more)))
    ran = flywheel("train", "sft", *files, "--output", "out2", "--json")
    assert (ran.code, ran.json["adapter"], ran.json["reason"]) == (1, None, "none of 13 tasks")
    compare(ran.json, documented("train"), "train sft")
    assert ran.json["rows"] == {"read": 14, "trained": 0, "held_out": 1, "left_out": 13}
    first, second = ran.json["left_out"]
    assert first == {"reason": TOO_LONG.format(902), "rows": 12, "file": str(data), "first_line": 2}
    assert (second["reason"], second["rows"]) == (held_out, 1)
    assert "flywheel: more rows were skipped (13) than trained on (0)" in ran.err


@pytest.mark.slow
def test_the_same_command_goes_on_with_a_round_that_was_stopped(
    train: Callable[..., Ran], tmp_path: Path, work: Callable[[str], None]
) -> None:
    base = ("--base-model", "m")
    work("exit 143")
    assert train("sft", *base).code == 1
    directory = tmp_path / "out.round"
    (directory / "identity.json").write_text(json.dumps(identity_of(read_spec(directory))))
    work(REFUSES)
    other = train("sft", *base, "--epochs", 7)
    assert "goes on" not in other.err
    assert "it starts over: since the unfinished round in" in other.err
    assert "out.round, these have changed: settings" in other.err
    assert (tmp_path / "out.round-2" / "result.json").exists(), other.err
    assert not (directory / "result.json").exists()
    ran = train("sft", *base)
    assert "it goes on with the round in" in ran.err
    assert (directory / "result.json").exists()
    assert not (tmp_path / "out.round-3").exists()
    # A round that is refused leaves no adapter.
    assert (ran.code, (tmp_path / "out").exists()) == (1, False)
    assert "sft made no adapter: no spread" in ran.err


@pytest.mark.slow
def test_what_is_wrong_is_named(flywheel: Run, tmp_path: Path, data: Path) -> None:
    def fails(stage: str, *options: str | Path, code: int) -> str:
        ran = flywheel("train", stage, "--data", data, *options)
        assert ran.code == code
        return ran.err

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "full is not empty" in fails("sft", "--output", "full", "--base-model", "m", code=78)
    assert "neither --base-model nor model.base names one" in fails("sft", "--output", "out", code=78)
    wrong = fails("sft", "--output", "out", "--base-model", "m", "--task-weights", "timing=0.2", code=78)
    assert "`--task-weights`: timing is a class of SAGE, by words; " in wrong and "the nearest: no_tools" in wrong
    twice = ("--output", "out", "--base-model", "m", "--task-weights", "one_tool=1, one_tool=3,no_tools=1")
    assert "one_tool is given twice, as 1 and as 3" in " ".join(fails("sft", *twice, code=2).split())
    assert "No such option" in fails("sft", "--output", "out", "--base-model", "m", "--beta", "1", code=2)
    twice = ("--output", "out", "--base-model", "m", "--epochs", "1", "--steps", "1")
    assert "Give a whole number from 1, without --steps" in fails("grpo", *twice, code=78)
    assert "is not there" in fails("grpo", "--output", "out", "--sft-model", "nowhere", code=78)
    without_rubric = fails("grpo", "--output", "out", "--base-model", "m", code=78)
    assert "cannot train with grpo: its rollouts get no rewards: there is no rubric" in without_rubric
    data.write_text('{"question": "1+1?"}\n')
    assert "chats.jsonl: line 1: it has no reply" in fails("sft", "--output", "out", "--base-model", "m", code=78)
    data.unlink()
    assert "No such file" in fails("sft", "--output", "out", "--base-model", "m", code=78)
    assert not (tmp_path / "out.round").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("work")
def test_dpo_on_preferences_needs_no_rubric(flywheel: Run, tmp_path: Path) -> None:
    preferences(tmp_path)
    options = ("--epochs", 2, "--num-samples", 4, "--beta", 0.2, "--batch-size", 3, "--learning-rate", 0.001)
    files = ("--base-model", "m", "--data", "preferences.jsonl", "--output", "out")
    ran = flywheel("train", "dpo", *files, *options)
    assert ran.code == 0, ran.err
    made = spec(tmp_path)
    training = made["settings"]["training"]
    assert (training["stages"], training["group_size"]) == (["dpo"], 4)
    names = ("epochs", "beta", "batch_size", "learning_rate")
    assert [training["dpo"][name] for name in names] == [2, 0.2, 3, 0.001]
    assert (len(made["train"]), made["held_out"], made["rubric"]) == (12, [], {})
    replies = [(task["reply"][-1]["content"], task["rejected"][-1]["content"]) for task in made["train"]]
    assert replies == [(str(2 * n), "unknown") for n in range(12)]


def preferences(folder: Path) -> None:
    lines = [
        {"prompt": f"What is {n} plus {n}?", "chosen": str(2 * n), "rejected": "unknown"} for n in range(len(CHATS))
    ]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_sft_on_conversations_and_dpo_on_preferences(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preferences(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def trained(stage: str, output: str, *options: str) -> Any:
        command = [sys.executable, "-m", "flywheel", "train", stage, "--output", output, "--json"]
        more = ["--learning-rate", "0.01", "--max-length", "192", *options]
        ran = subprocess.run(
            [*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False
        )
        log = tmp_path / f"{output}.round" / "worker.log"
        assert ran.returncode == 0, ran.stderr + (log.read_text()[-3000:] if log.exists() else "")
        files = sorted(path.name for path in (tmp_path / output).iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
        return json.loads(ran.stdout)

    tracked = ("-c", "tracked.yaml")
    asked = {"role": "user", "content": "What is 40 minus 40?"}
    long = {"messages": [asked, {"role": "assistant", "content": "Zero. " * 200}]}
    data.write_text(data.read_text() + json.dumps(long) + "\n")
    (tmp_path / "tracked.yaml").write_text(
        json.dumps({"tracking": {"report_to": list(READERS)}, "training": {"sft": {"warmup_steps": 0.9}}})
    )
    first = trained("sft", "first", "--base-model", str(POLICY), "--data", str(data), "--epochs", "2", *tracked)
    assert (first["adapter"], first["steps"], first["comparison"]) == (str(tmp_path / "first"), 2, None)
    [left_out] = first["left_out"]
    assert first["rows"] == {"read": 13, "trained": 8, "held_out": 4, "left_out": 1}
    assert (left_out["rows"], left_out["first_line"]) == (1, 13)
    assert re.fullmatch(r"it has [\d,]+ tokens, and rollout\.max_model_len is 192", left_out["reason"])
    assert first["held_out_loss"][1] < first["held_out_loss"][0]
    steps = [(line["step"], figures_of(line)) for line in read_steps(tmp_path / "first.round")]
    for name, runs in READERS.items():
        ((_, run),) = runs(tmp_path / "first.round" / "tracking").items()
        assert (run.name, run.decision["outcome"]) == ("sft", "trained"), name
        assert str(run.settings["training.sft.epochs"]) == "2"
        assert same(run.steps, steps), (name, run.steps, steps)
    options = ("--sft-model", "first", "--data", "preferences.jsonl", "--epochs", "3", "--batch-size", "6")
    second = trained("dpo", "second", *options)
    assert (second["steps"], second["comparison"]) == (6, None)
    assert second["loss"][1] < second["loss"][0]
    spec = json.loads((tmp_path / "second.round" / "spec.json").read_text())
    assert (spec["base_model"], spec["parent"]["path"]) == (str(POLICY), str(tmp_path / "first"))

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    about = {"learning_rate": 0.01, "max_length": 192, "epochs": 2, "warmup": 0.9}
    third = flywheel.sft(rows, model=POLICY, output=tmp_path / "third", **about)
    assert (third.adapter, third.steps, third.directory) == (tmp_path / "third", 2, tmp_path / "third.round")
    of_command, of_function = (tmp_path / name / "adapter_model.safetensors" for name in ("first", "third"))
    assert of_function.read_bytes() == of_command.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
async def test_only_a_worker_that_does_the_same_is_adopted(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    class StartedError(Exception):
        """Another worker was started."""

    async def start(*_: Any, **__: Any) -> Any:
        raise StartedError

    monkeypatch.setattr(file_round.WorkerProcess, "start", start)
    config = make_config(tmp_path, model={"base": "m"}, training={"stages": ["sft"]})
    made = file_round.spec_of(config, str(data), None, compares=False)
    directory = tmp_path / "round"
    directory.mkdir()
    (directory / "identity.json").write_text(json.dumps(identity_of(made) if is_same else {"tasks": "others"}))
    result = RoundResult(round_id="tune", outcome="refused", reason="it learns nothing")
    (directory / "result.json").write_text(result.model_dump_json())
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "flywheel.training.worker", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        if is_same:
            ending = worker.stdin.close  # type: ignore[union-attr]
            done = await file_round.run_worker(made, directory, config, begin=ending)
            assert done.reason == "it learns nothing"
        else:
            with pytest.raises(StartedError):
                await file_round.run_worker(made, directory, config)
