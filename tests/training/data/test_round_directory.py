"""The round directory, the lock on it, and what a worker does with input that cannot work."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flywheel import __version__
from flywheel.config.file import Config
from flywheel.errors import LockedError, TrainError
from flywheel.records.round import AdapterRef, RoundResult, RoundSpec
from flywheel.system.files import tree_sha256, write_json
from flywheel.system.lock import alone_in
from flywheel.training.data.round_directory import (
    FORMAT,
    clear,
    finished,
    go_on,
    has_format,
    read_spec,
    settings_of,
    version_of,
)
from tests.factories.round import BOXED, round_spec


def worker(directory: Path, made: RoundSpec | None) -> subprocess.CompletedProcess[str]:
    if made is not None:
        (directory / "spec.json").write_text(made.model_dump_json())
    command = [sys.executable, "-m", "flywheel.training.worker", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def bad_parent(path: Path, digest: str) -> dict[str, Any]:
    return {"parent": AdapterRef(name="r0000", path=str(path), sha256=digest)}


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.parametrize(
    ("changes", "error", "hint"),
    [
        (
            {"base_model": "/nowhere/model"},
            "cannot load base model /nowhere/model: there is no such directory",
            "hub",
        ),
        ({"train": []}, "cannot train r0001: it has no task", "judge more traces"),
        ({"rubric": {**BOXED, "criteria": []}}, "the rubric of r0001", "rubric"),
        ({"settings": {"trainin": {}}}, "unknown key `trainin` (did you mean `training`?)", "versions"),
        (
            bad_parent(Path("/nowhere/adapter"), "0"),
            "cannot continue from adapter r0000: its directory /nowhere/adapter is not there",
            "Roll back",
        ),
    ],
)
def test_what_cannot_work_is_said_in_one_line_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], error: str, hint: str
) -> None:
    done = worker(tmp_path, round_spec(**changes))
    assert done.returncode == 1
    assert done.stderr.startswith("flywheel.training.worker: cannot ")
    assert done.stderr.count("\n") == 1
    said = json.loads((tmp_path / "error.json").read_text())
    assert error in said["error"]
    assert hint in said["hint"]
    assert said["retryable"] is False
    assert "Traceback" not in done.stderr + (tmp_path / "worker.log").read_text()
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
@pytest.mark.training
def test_a_directory_without_a_specification_is_said_to_be_one(tmp_path: Path) -> None:
    done = worker(tmp_path, None)
    assert done.returncode == 1
    assert done.stderr.startswith(f"flywheel.training.worker: cannot read {tmp_path}/spec.json: No such file")
    assert json.loads((tmp_path / "error.json").read_text())["retryable"] is False
    assert worker(tmp_path / "nowhere", None).returncode == 1


@pytest.mark.slow
@pytest.mark.training
def test_a_directory_that_cannot_be_used_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "worker.lock").mkdir()
    done = worker(tmp_path, round_spec())
    assert done.returncode == 1
    assert done.stderr.startswith("flywheel.training.worker: cannot run r0001: IsADirectoryError")
    assert done.stderr.count("\n") == 1
    assert json.loads((tmp_path / "error.json").read_text())["retryable"] is True


@pytest.mark.slow
@pytest.mark.training
def test_a_full_disk_at_the_very_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flywheel.training import worker

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "spec.json").write_text(round_spec().model_dump_json())
    result = RoundResult(round_id="r0001", outcome="refused", reason="no spread")
    monkeypatch.setattr(worker, "run_round", lambda *_: result)
    monkeypatch.setattr(worker, "write_atomic", full)
    with pytest.raises(TrainError, match=r"cannot run r0001: OSError: .*No space left on device\. Free space\."):
        worker.work(tmp_path, worker.build_grade)


@pytest.mark.slow
@pytest.mark.training
def test_a_disk_that_fills_up_during_a_step_is_said_and_what_only_steps_need_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an error of its own for it, and the adapters of steps would stay on the full disk."""
    from flywheel.training import worker

    def fill(_: RoundSpec, directory: Path, *__: Any) -> RoundResult:
        for name in ("sync/step-1", ".adapter.new"):
            (directory / name).mkdir(parents=True)
        (directory / "rollouts").mkdir()
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    (tmp_path / "spec.json").write_text(round_spec().model_dump_json())
    monkeypatch.setattr(worker, "run_round", fill)
    with pytest.raises(TrainError, match=r"cannot run r0001: RuntimeError: .*\(os error 28\)\. Free space\."):
        worker.work(tmp_path, worker.build_grade)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"spec.json", "identity.json", "rollouts", "worker.log", "worker.lock"}


@pytest.mark.slow
@pytest.mark.training
def test_a_changed_parent_is_noticed(tmp_path: Path) -> None:
    adapter = tmp_path / "parent"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    digest = tree_sha256(adapter)
    (adapter / "adapter_config.json").write_text('{"r": 16}')
    done = worker(tmp_path, round_spec(**bad_parent(adapter, digest)))
    assert done.returncode == 1
    assert "are not those that were evaluated" in done.stderr


@pytest.mark.slow
@pytest.mark.training
def test_two_workers_never_share_a_directory(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(LockedError, match="another worker"), alone_in(tmp_path):
            pass
        done = worker(tmp_path, round_spec())
        assert done.returncode == 75
        # The other worker's files are its own.
        assert not (tmp_path / "error.json").exists()
    with alone_in(tmp_path):
        pass


@pytest.mark.slow
@pytest.mark.training
def test_a_finished_round_is_left_as_it_is(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    reference = AdapterRef(name="r0001", path=str(adapter), sha256=tree_sha256(adapter))
    result = RoundResult(round_id="r0001", outcome="trained", adapter=reference)
    assert not finished(tmp_path, round_spec())
    (tmp_path / "result.json").write_text(result.model_dump_json())
    assert finished(tmp_path, round_spec())
    assert worker(tmp_path, round_spec(attempt=2)).returncode == 0
    assert (adapter / "adapter_model.safetensors").read_bytes() == b"weights"

    assert not finished(tmp_path, round_spec(round_id="r0002"))
    (adapter / "adapter_model.safetensors").write_bytes(b"torn")
    assert not finished(tmp_path, round_spec())
    (tmp_path / "result.json").write_text(result.model_dump_json()[:40])
    assert not finished(tmp_path, round_spec())


MADE_ANEW = ["evaluation.jsonl", "progress.json", "result.json", "error.json", "adapter", "sync", ".adapter.new"]
GONE_ON_WITH = ["rollouts", "partial.jsonl", "reward.json", "stages"]
OF_FORMAT_1 = ["rollouts.jsonl", "rollouts.index.jsonl"]
OTHERS = ["spec.json", "worker.log", "worker.lock", "usage.jsonl", "notes.txt"]


def left_by_a_worker(directory: Path) -> None:
    for name in (*MADE_ANEW, *GONE_ON_WITH, *OTHERS):
        path = directory / name
        if path.suffix and path.suffix != ".new":
            path.write_text("left")
        else:
            (path / "1-grpo").mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text('{"event": "phase"}\n{"event": "step", "step": 1}\n{"event": "st')


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_further_attempt_goes_on_with_the_same_round(tmp_path: Path) -> None:
    assert go_on(tmp_path, round_spec(attempt=1)) == ""
    left_by_a_worker(tmp_path)
    assert go_on(tmp_path, round_spec(attempt=2)) == ""
    assert names(tmp_path) == {*GONE_ON_WITH, *OTHERS, "metrics.jsonl", "identity.json"}
    # Phases are those of the worker that runs; half a line is none.
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"event": "step", "step": 1}
    ]


def test_a_worker_of_another_version_goes_on_and_is_known_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert version_of(tmp_path) is None
    monkeypatch.setattr("flywheel.training.data.round_directory.__version__", "0.0.1")
    go_on(tmp_path, round_spec())
    assert version_of(tmp_path) == "0.0.1"
    left_by_a_worker(tmp_path)
    monkeypatch.undo()
    assert go_on(tmp_path, round_spec(attempt=2)) == ""
    assert (version_of(tmp_path), (tmp_path / "rollouts").exists()) == (__version__, True)


@pytest.mark.parametrize("number", [None, 1, 2, 4])
def test_an_unfinished_round_whose_files_have_another_format_starts_over_and_says_so(
    tmp_path: Path, number: int | None
) -> None:
    go_on(tmp_path, round_spec())
    identity = json.loads((tmp_path / "identity.json").read_bytes())
    assert (has_format(tmp_path), identity.pop(FORMAT)) == (True, 3)
    left_by_a_worker(tmp_path)
    for name in OF_FORMAT_1:
        (tmp_path / name).write_text("left")
    write_json(tmp_path / "identity.json", identity if number is None else {**identity, FORMAT: number})
    assert not has_format(tmp_path)
    assert go_on(tmp_path, round_spec(attempt=2)) == "format of the files"
    assert names(tmp_path) == {*OTHERS, "identity.json"}
    assert has_format(tmp_path)


def changed(section: str, **values: Any) -> dict[str, Any]:
    settings = Config().model_dump(mode="json")
    settings[section] |= values
    return settings


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"parent": AdapterRef(name="r0001", path="/r0001", sha256="a")}, "parent"),
        ({"rubric": {"id": "other"}}, "rubric"),
        ({"settings": changed("training", learning_rate=1.0)}, "settings"),
        ({"settings": changed("rollout", temperature=0.5)}, "settings"),
        ({"settings": changed("judge", model="another")}, "settings"),
        ({"left_out": {"t-1": "it is held"}}, "tasks"),
        ({"base_model": "other", "rubric": {"id": "other"}}, "base model, rubric"),
    ],
)
def test_another_round_in_the_same_place_starts_over_and_says_what_changed(
    tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    go_on(tmp_path, round_spec())
    left_by_a_worker(tmp_path)
    assert go_on(tmp_path, round_spec(attempt=2, **change)) == what
    assert names(tmp_path) == {*OTHERS, "identity.json"}


@pytest.mark.parametrize(
    "settings",
    [
        changed("judge", max_thread=3, budget={"tokens_per_day": 5, "tokens_per_run": None}),
        changed("judge", response_format="tool", omit=["seed"]),
        changed("training", save_steps=1, judge_wait_seconds=1.0),
        changed("daemon", round_attempts=9),
    ],
)
def test_settings_that_change_no_rollout_and_no_weight_start_nothing_over(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    go_on(tmp_path, round_spec())
    left_by_a_worker(tmp_path)
    assert go_on(tmp_path, round_spec(attempt=2, settings=settings)) == ""
    assert (tmp_path / "rollouts").exists()


AGENT = {
    "agents/shop.py": "import asyncio, json, words\nasync def run(task, model):\n    from tools import search\n",
    "agents/words.py": "from flywheel.tuner import tune\n",
    "agents/far.py": "",
    "agents/tools/__init__.py": "",
    "agents/tools/search.py": "from . import near\nimport words, deep, far\n",
    "agents/tools/near.py": "broken(",
    "agents/tools/other.py": "",
    "agents/asyncio.txt": "",
    "deep.py": "",
    "flywheel/tuner.py": "",
    "rewards.py": "import words\nasync def judge(task, response): ...\n",
    "package/setup.py": "from package.parts import first\n",
    "package/parts/__init__.py": "",
    "package/parts/first.py": "",
    "package/parts/second.py": "",
    "src/shop/__init__.py": "",
    "src/shop/__main__.py": "from . import run\n",
    "src/shop/run.py": "from shop.score import score\n",
    "src/shop/score.py": "",
    "start.sh": "exec python agents/shop.py",
    "notes.txt": "",
}
OF_FUNCTIONS = {
    "agents/shop.py", "agents/words.py", "agents/far.py",
    "agents/tools/__init__.py", "agents/tools/search.py", "agents/tools/near.py",
    "deep.py", "rewards.py", "package/setup.py", "package/parts/__init__.py", "package/parts/first.py",
}  # fmt: skip
OF_PACKAGE = {"src/shop/__init__.py", "src/shop/run.py", "src/shop/score.py"}
OF_SHOP = {name for name in OF_FUNCTIONS if name.startswith(("agents/", "deep"))}


@pytest.mark.parametrize(
    ("agent", "functions", "files"),
    [
        (
            {"workflow": "{}/agents/shop.py:run"},
            {"reward_function": "{}/rewards.py:judge", "setup": "package.setup:start"},
            OF_FUNCTIONS,
        ),
        ({"workflow": "package.setup->Agent"}, {}, {name for name in OF_FUNCTIONS if name.startswith("package/")}),
        ({"command": ["python", "agents/shop.py", "--size", "9" * 400, "\0", ""]}, {}, OF_SHOP),
        ({"command": ["sh", "start.sh"]}, {}, {"start.sh"}),
        ({"command": ["python", "-m", "agents.shop"]}, {}, OF_SHOP),
        ({"command": ["python", "-m", "src.shop"]}, {}, {*OF_PACKAGE, "src/shop/__main__.py"}),
        ({"workflow": "{}/src/shop/run.py:run"}, {}, OF_PACKAGE),
        # Data that a command names is no code: a run may have written it.
        ({"command": ["python", "agents/shop.py", "notes.txt"]}, {}, OF_SHOP),
        ({"workflow": "{}/agents/missing.py:run"}, {}, set()),
    ],
)
def test_a_round_whose_agent_has_other_code_starts_over_and_names_the_file(
    tmp_path: Path, agent: dict[str, Any], functions: dict[str, str], files: set[str]
) -> None:
    folder, directory = tmp_path / "project", tmp_path / "round"
    directory.mkdir()
    for name, text in AGENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    here = {key: value.format(folder) if isinstance(value, str) else value for key, value in agent.items()}
    rollout = {key: value.format(folder) for key, value in functions.items()}
    settings = changed("rollout", agent={**here, "folder": str(folder)}, **rollout)
    go_on(directory, round_spec(settings=settings))
    for name, text in AGENT.items():
        left_by_a_worker(directory)
        (folder / name).write_text(f"{text}\n# corrected\n")
        starts_over = go_on(directory, round_spec(attempt=2, settings=settings)) == str(folder / name)
        assert (starts_over, (directory / "partial.jsonl").exists()) == (name in files, name not in files), name
    if files:
        left_by_a_worker(directory)
        (folder / min(files)).unlink()
        assert str(folder / min(files)) in go_on(directory, round_spec(attempt=2, settings=settings))
        assert not (directory / "partial.jsonl").exists()


def test_a_debug_round_and_files_without_an_identity_start_over(tmp_path: Path) -> None:
    left_by_a_worker(tmp_path)
    assert go_on(tmp_path, round_spec(debug=True)) == ""
    assert names(tmp_path) == {*OTHERS, "identity.json"}
    left_by_a_worker(tmp_path)
    assert go_on(tmp_path, round_spec(debug=True)) == ""
    assert not (tmp_path / "rollouts").exists()


def test_a_round_that_is_over_keeps_no_checkpoints(tmp_path: Path) -> None:
    go_on(tmp_path, round_spec())
    checkpoints, adapter = tmp_path / "stages" / "1-grpo" / "checkpoints", tmp_path / "stages" / "1-grpo" / "adapter"
    for folder in (checkpoints / "checkpoint-1", adapter, tmp_path / "sync" / "step-1"):
        folder.mkdir(parents=True)
    for name in ("partial.jsonl", "reward.json"):
        (tmp_path / name).write_text("")
    clear(tmp_path, is_over=False)
    assert checkpoints.is_dir()
    assert not (tmp_path / "sync").exists()
    clear(tmp_path, is_over=True)
    assert names(tmp_path) == {"stages"}
    assert adapter.is_dir()
    assert not checkpoints.exists()


def test_specification_and_settings_come_back(tmp_path: Path) -> None:
    made = round_spec()
    (tmp_path / "spec.json").write_text(made.model_dump_json())
    assert read_spec(tmp_path) == made
    assert settings_of(made) == Config()
    (tmp_path / "spec.json").write_text('{"round_id": "r0001"}')
    with pytest.raises(TrainError, match=r"cannot read .*spec\.json: attempt: Field required"):
        read_spec(tmp_path)
