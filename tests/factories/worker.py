"""Whole rounds of training: `python -m flywheel.training.worker` with real Ray, vLLM and TRL, the demo's policy and a
judge over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import SYSTEM_PROMPT, Question, questions
from flywheel.config.file import Config
from flywheel.records.round import AdapterRef, GateTest, RoundResult, RoundSpec, RoundTask
from flywheel.system.process_folder import PREFIX
from flywheel.training.data import rollout_file
from flywheel.training.data.round_progress import progress_of
from tests.factories.round import POLICY
from tests.factories.task import round_task
from tests.waiting import wait_for

STEPS, PROMPTS, GROUP = 3, 4, 8
HELD_OUT, SAMPLES = 12, 2
MADE: set[Path] = set()
"""Directories to remove at the end."""
RUBRIC = {
    "version": 1,
    "id": "math-boxed",
    "criteria": [
        {"id": "boxed", "type": "contains", "value": "\\boxed{", "required": True},
        {"id": "correct", "value": "The boxed number is right.", "weight": 9},
    ],
}


@dataclass(frozen=True)
class Done:
    """A worker that has ended, and what it left."""

    directory: Path
    spec: RoundSpec
    code: int
    stderr: str
    left_running: list[str]
    left_behind: list[Path]

    @cached_property
    def result(self) -> RoundResult:
        return RoundResult.model_validate_json((self.directory / "result.json").read_bytes())

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.directory / "metrics.jsonl")

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["event"] == "step"]

    @cached_property
    def rollouts(self) -> list[dict[str, Any]]:
        return list(rollout_file.rollouts(self.directory))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tasks(some: list[Question], prefix: str) -> list[RoundTask]:
    return [
        round_task(
            f"t-{prefix}{place}",
            question.text,
            reference=f"\\boxed{{{question.answer}}}",
            history=(),
            prompt=[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}],
        )
        for place, question in enumerate(some)
    ]


def spec(judge_url: str, **changes: Any) -> RoundSpec:
    some = questions()
    random.Random(1).shuffle(some)
    too_long = round_task(
        "t-long", "?", reference="", history=(), prompt=[{"role": "user", "content": "word " * 500}]
    )
    hidden = tasks([Question("What is 1 plus 1?", 2)], "hidden-")[0].model_copy(update={"prompt_tokens": 120})
    settings = Config.model_validate(
        {
            "judge": {"base_url": judge_url, "model": "demo-judge", "max_thread": 4, "max_attempts": 1},
            "training": {
                "steps": STEPS,
                "prompts_per_step": PROMPTS,
                "group_size": GROUP,
                "micro_batch_size": 16,
                "learning_rate": 5e-3,
                "lora": {"r": 8, "alpha": 16},
            },
            "rollout": {"max_completion_tokens": 16, "max_model_len": 128},
            "serving": {"max_model_len": 192},
            "gate": {"max_tasks": HELD_OUT, "samples": SAMPLES},
        }
    )
    fields: dict[str, Any] = {
        "round_id": "r0001",
        "attempt": 1,
        "seed": 7,
        "debug": False,
        "base_model": str(POLICY),
        "parent": None,
        "train": [*tasks(some[:30], "train-"), too_long, hidden],
        "held_out": [*tasks(some[30 : 30 + HELD_OUT + 5], "held-"), *tasks(some[46:47], "same-")],
        "rubric": RUBRIC,
        "settings": settings.model_dump(mode="json"),
        "test": GateTest(epoch=1, number=1, alpha=0.0024),
    }
    return RoundSpec(**{**fields, **changes})


def temporary(directory: Path) -> Path:
    """The worker's TMPDIR. Its processes are found by it, whatever their parents are. vLLM needs a short path: those
    of its sockets have at most 107 characters."""
    return Path("/tmp") / f"fwt-{hashlib.sha256(str(directory.parent).encode()).hexdigest()[:12]}"


def environment(directory: Path) -> dict[str, str]:
    own = temporary(directory)
    own.mkdir(exist_ok=True)
    MADE.add(own)
    added = {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "TMPDIR": str(own)}
    return {**os.environ, **added}


def start(directory: Path, made: RoundSpec) -> subprocess.Popen[str]:
    directory.mkdir(exist_ok=True)
    (directory / "spec.json").write_text(made.model_dump_json())
    command = [sys.executable, "-m", "flywheel.training.worker", str(directory)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(directory),
        start_new_session=True,
    )


def family(directory: Path) -> list[psutil.Process]:
    """Every process that has this worker's TMPDIR, whoever its parent is by now: orphans are found, too."""
    own = str(temporary(directory))
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def below(pid: int) -> list[psutil.Process]:
    """The processes below a living one. A process that sets its title may overwrite its environment with it."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def left_behind(pid: int, directory: Path) -> list[Path]:
    """What the worker left where temporary files go (Ray needs a short path, so that need not be TMPDIR)."""
    parents = Path("/tmp"), temporary(directory)
    return [path.parent for parent in parents for path in parent.glob(f"{PREFIX}*/session_*_{pid}")]


def end(process: subprocess.Popen[str], directory: Path) -> None:
    """Kill -9 a worker with all of its processes, and remove what it then leaves where temporary files go."""
    for member in family(directory):
        member.kill()
    process.communicate()
    for path in left_behind(process.pid, directory):
        shutil.rmtree(path, ignore_errors=True)


def run(directory: Path, made: RoundSpec, meanwhile: Callable[[], None] = lambda: None) -> Done:
    process = start(directory, made)
    try:
        meanwhile()
        _, stderr = process.communicate(timeout=600)
        left = [" ".join(p.cmdline())[:80] for p in family(directory)]
    finally:
        for member in family(directory):
            member.kill()
        process.wait()
    return Done(directory, made, process.returncode, stderr, left, left_behind(process.pid, directory))


def read(path: Path) -> str:
    """What is in a file that may be replaced just now."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def paused(directory: Path) -> str:
    progress = progress_of(directory)
    return progress.paused if progress is not None else ""


def with_reply(task: RoundTask) -> RoundTask:
    answer = task.exchange.reference
    return task.model_copy(update={"reply": ({"role": "assistant", "content": answer},) if answer else ()})


def graded(directory: Path) -> int:
    return read(directory / "partial.jsonl").count("\n")


class Judge:
    """The demo's judge, which answers no more once `holds` returns true: a death then is at that moment."""

    def __init__(self) -> None:
        self.holds: Callable[[], bool] = lambda: False
        self.released = threading.Event()

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.holds():
            self.released.wait(600)
        return judge.complete(request)

    @contextlib.contextmanager
    def holding(self, when: Callable[[], bool]) -> Iterator[None]:
        self.released.clear()
        self.holds = when
        yield
        self.holds = lambda: False
        self.released.set()


def killed(
    directory: Path,
    made: RoundSpec,
    when: Callable[[], bool],
    who: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> set[str]:
    """Start the worker, and at a moment kill -9 it with all of its processes, or one of its actors alone: then the
    worker ends by itself, with the reason. Returns hashes of the weights that the engines had of steps."""
    process = start(directory, made)
    try:
        meanwhile()
        wait_for(lambda: when() or process.poll() is not None, f"the moment to kill the {who}", seconds=400)
        assert process.poll() is None, read(directory / "worker.log")[-3000:]
        # The engine's own copies.
        sessions = left_behind(process.pid, directory)
        synced = {weights(path) for each in sessions for path in each.glob(f"{PREFIX}*/*") if path.is_dir()}
        if who != "worker":
            [actor] = [each for each in below(process.pid) if " ".join(each.cmdline()).startswith(f"ray::{who}")]
            actor.kill()
            process.communicate(timeout=300)
            error = json.loads(read(directory / "error.json"))
            assert (process.returncode, error["retryable"]) == (1, True), error
    finally:
        end(process, directory)
    return synced


def weights(path: Path) -> str:
    return hashlib.sha256((path / "adapter_model.safetensors").read_bytes()).hexdigest()


def logprobs_of(adapters: list[AdapterRef], prompt: list[int], tokens: list[int]) -> list[list[float]]:
    """Under the base model and under each adapter, by transformers and PEFT: nothing that the round used."""
    code = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapters, prompt, tokens = json.load(sys.stdin)
def measure(model):
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
load = AutoModelForCausalLM.from_pretrained
made = [measure(PeftModel.from_pretrained(load(base), adapter)) for adapter in adapters]
print(json.dumps([measure(load(base)), *made]))
"""
    given = json.dumps([str(POLICY), [adapter.path for adapter in adapters], prompt, tokens])
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
    found: list[list[float]] = json.loads(done.stdout)
    return found
