"""A directory of a round that has texts of two tasks to erase, and of two others, in every file that can have any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flywheel.records.round import (
    Probe,
    Recording,
    RoundResult,
    SamplePool,
    Sampling,
    Score,
    StageResult,
    SystemPrompt,
)
from flywheel.records.selection import Candidate, SelectionRules
from flywheel.records.tool_calls import SharedRecordings, ToolResult
from flywheel.system.files import append_jsonl, json_line, write_json
from flywheel.training.data.rollout_file import step_file, write_step
from flywheel.training.data.round_directory import CHECKPOINTS_DIR, IDENTITY_FILE
from tests.factories.round import comparison, put_answers, round_spec
from tests.factories.task import round_task

GONE, GONE_HELD_OUT, STAYS, STAYS_HELD_OUT = "t-gone", "t-gone-held-out", "t-stays", "t-stays-held-out"
TEXTS = {
    GONE: 'Where does "Amélie\\Quist" live?\nAnd since when?',
    GONE_HELD_OUT: "我的密码是七三九一二四,请记住它 🦊🔑 and tell nobody",
    STAYS: 'Where does "Boris\\Lund" live?\nAnd since when?',
    STAYS_HELD_OUT: "他的电话是五五五零一二三,请打给他 🐻🔔 tomorrow",
}
"""What each task has in every one of its texts."""
ERASED = frozenset({GONE, GONE_HELD_OUT})


def tokens(text: str) -> list[int]:
    """The ids of a tokenizer whose tokens are characters."""
    return [ord(character) for character in text]


def forms(text: str) -> list[bytes]:
    """How a file can have a text: as it is, and in JSON with and without ASCII alone."""
    return [
        text.encode(),
        *(json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode() for ascii_only in (True, False)),
    ]


def rollout(task: str, step: int, group: int, seed: int) -> dict[str, Any]:
    text = TEXTS[task]
    criteria = [{"criterion": "correct", "choice": "yes", "value": 1.0, "passed": True, "reason": f"it says {text}"}]
    ids = tokens(f"{text} {seed}")
    sample = {"token_ids": ids, "loss_mask": [1] * len(ids), "logprobs": [-0.5] * len(ids), "text": list(text)}
    return {
        "step": step, "task_id": task, "group": group, "seed": seed, "steps": [{"role": "tool", "content": text}],
        "answer": f"{text}!", "truncated": False, "reward": seed % 2, "criteria": criteria, "error": text,
        "missed": False, "advantage": 0.5, "dropped": None, "turns": 1, "forks": 0, "calls": [], "verdict": None,
        "system_prompts": [f"You talk to a person who said {text}"], "samples": [sample],
    }  # fmt: skip


def put_erasable_round(directory: Path, *, is_over: bool = True) -> None:
    """Write the files of a round, which is over or whose worker has died."""
    said = (f"You talk to a person who said {TEXTS[task]}" for task in (GONE, STAYS))
    prompts = [SystemPrompt(text=text, rollouts=4) for text in (*said, "Be brief.", "")]
    candidates = {task: Candidate(number, user=TEXTS[task]) for number, task in enumerate(TEXTS)}
    shared = {f"{task}'s call": ToolResult(TEXTS[task], task_id=task) for task in TEXTS}
    spec = round_spec(
        train=[round_task(task, TEXTS[task], reference=TEXTS[task]) for task in (GONE, STAYS)],
        held_out=[round_task(task, TEXTS[task], reference=TEXTS[task]) for task in (GONE_HELD_OUT, STAYS_HELD_OUT)],
        left_out={task: f"it says {TEXTS[task]}" for task in (GONE, STAYS)},
        pool=SamplePool(
            size=1, strategy="loss_topk", candidates=candidates, rules=SelectionRules(most=2, needed=1)
        ),
        shared=SharedRecordings(shared),
        shared_gate=SharedRecordings(shared),
    )  # fmt: skip
    result = RoundResult(
        round_id="r0001",
        outcome="trained",
        reason=f"ValueError: {TEXTS[GONE][:34]}… is no number",
        comparison=comparison().model_copy(
            update={"scores": [Score(task_id=task, candidate=1, deployed=0) for task in TEXTS]}
        ),
        probe=put_probe(),
        left_out={task: f"it says {TEXTS[task]}" for task in (GONE, STAYS)},
        released=[GONE, STAYS],
        without_gradient=[STAYS, GONE],
        stages=[StageResult(stage="dpo", outcome="trained", reason=f"no pair: {TEXTS[GONE]}")],
        sampling=Sampling(temperature=1, steps=2, prompts=2, group_size=2, system_prompts=prompts),
    )
    stage = directory / "stages" / "1-dpo"
    (stage / CHECKPOINTS_DIR / "checkpoint-1").mkdir(parents=True)
    write_json(directory / "spec.json", spec.model_dump(mode="json"))
    write_json(directory / "result.json", result.model_dump(mode="json"))
    write_json(directory / "error.json", {"error": f"cannot run: {TEXTS[GONE]}", "hint": "Look.", "retryable": False})
    write_json(directory / "progress.json", {"phase": "training", "paused": f"the judge: {TEXTS[GONE_HELD_OUT]}"})
    write_json(
        stage / "trained.json",
        {
            "refusal": TEXTS[GONE], "with_gradient": [GONE, STAYS], "steps": 2,
            "system_prompts": {each.text: each.rollouts for each in prompts},
        },
    )  # fmt: skip
    append_jsonl(stage / "pairs.jsonl", [pair(GONE), pair(STAYS), pair(STAYS, rejected_task_id=GONE)])
    append_jsonl(
        directory / "selection.jsonl", [{"task_id": task, "loss": 0.5, "text": TEXTS[task]} for task in TEXTS]
    )
    append_jsonl(directory / "metrics.jsonl", [{"event": "step", "step": 1, "steps": 2, "loss": 0.25, "at": "now"}])
    for step, tasks in ((1, (GONE, STAYS)), (2, (STAYS, GONE))):
        made = [rollout(task, step, group, seed) for group, task in enumerate(tasks) for seed in (0, 1)]
        write_step(step_file(directory, step), made)
    put_answers(directory, [GONE_HELD_OUT, STAYS_HELD_OUT], "{side} says {key}")
    path = directory / "evaluation.jsonl"
    path.write_bytes(
        b"".join(
            json_line(answer | {"answer": TEXTS[answer["task_id"]], "error": TEXTS[answer["task_id"]]})
            for answer in map(json.loads, path.read_bytes().splitlines())
        )
    )
    (directory / "worker.log").write_text(f"Traceback: {TEXTS[GONE]!r}\n")
    (directory / "rollouts" / ".0003.jsonl.0123abcd").write_text(TEXTS[GONE])
    if not is_over:
        append_jsonl(directory / "partial.jsonl", [{"weights": "w", **rollout(GONE, 0, 0, 7)}])
        (directory / "usage.jsonl").write_text(f'{{"calls": 1}}\n{{"calls": "{TEXTS[GONE].partition(chr(10))[0]}')
        write_json(directory / IDENTITY_FILE, {"tasks": "0" * 64})


def put_probe() -> Probe:
    """A probe of two held-out tasks, of which each has half of the places."""
    texts = [tokens(TEXTS[task]) for task in (GONE_HELD_OUT, STAYS_HELD_OUT)]
    places = [(number % 2, 1 + number // 2) for number in range(8)]
    recording = Recording(adapter=[-float(at) for at in range(8)], base=[-1.0] * 8)
    return Probe(
        texts=texts, tasks=[GONE_HELD_OUT, STAYS_HELD_OUT], places=places, first=recording, second=recording
    )  # fmt: skip


def pair(task: str, **more: str) -> dict[str, Any]:
    said = TEXTS[more.get("rejected_task_id", task)]
    sides = {side: [{"role": "assistant", "content": f"{said} {side}"}] for side in ("chosen", "rejected")}
    return {"prompt": [{"role": "user", "content": TEXTS[task]}], **sides, "task_id": task, **more}


def contents(directory: Path) -> dict[str, bytes]:
    """The files by their relative paths."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "worker.lock"
    }


def records(data: bytes, name: str) -> Iterator[Any]:
    """The JSON values of a file, without those that are not written whole."""
    if name.endswith(".json"):
        yield json.loads(data)
    elif name.endswith(".jsonl"):
        yield from (json.loads(line) for line in data.split(b"\n")[:-1] if line.startswith(b"{"))


def token_texts(value: Any) -> Iterator[str]:
    """The texts of all lists of token ids within a value."""
    if isinstance(value, list):
        if value and all(isinstance(item, int) and 0 <= item < 0x110000 for item in value):
            yield "".join(map(chr, value))
        for item in value:
            yield from token_texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from token_texts(item)


def places_of(text: str, files: dict[str, bytes]) -> set[str]:
    """The files that have a text, in any form, also as token ids."""
    found = {name for name, data in files.items() if any(form in data for form in forms(text))}
    decoded = {
        name
        for name, data in files.items()
        for value in records(data, name)
        if any(text in each for each in token_texts(value))
    }
    return found | decoded
