"""The work of `benchmarks.round`: tasks, settings, scripted judge, and a model whose answers have a fixed length."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any, Final

from flywheel.cli.demo import judge
from flywheel.cli.demo.questions import SYSTEM_PROMPT, questions
from flywheel.config.file import Config
from flywheel.judge.prompt import parse_sections
from flywheel.records.round import RoundTask
from flywheel.records.verdict import Exchange

PROMPTS, GROUP, MICRO_BATCH = 8, 8, 16
SLOTS: Final = 16
TRAIN, HELD_OUT, SAMPLES = 60, 25, 4
ANSWER_TOKENS: Final = 32
PROMPT_TOKENS: Final = 112
SEED: Final = 7
RUBRIC: Final[dict[str, Any]] = {
    "version": 1,
    "id": "benchmark",
    "criteria": [{"id": "correct", "value": "The number is right."}],
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a run does. `latency` is the judge's, in seconds; `tokens` is the limit of an answer."""

    model: str
    steps: int
    latency: float
    overlap: int = 0
    tokens: int = ANSWER_TOKENS
    held_out: int = 0

    @property
    def rollouts(self) -> int:
        return self.steps * PROMPTS * GROUP

    @property
    def settings(self) -> Config:
        longest = self.tokens + PROMPT_TOKENS
        return Config.model_validate(
            {
                "judge": {"model": judge.MODEL, "max_thread": SLOTS},
                "training": {
                    "steps": self.steps,
                    "prompts_per_step": PROMPTS,
                    "group_size": GROUP,
                    "micro_batch_size": MICRO_BATCH,
                    # So small that the policy stays what it is: a policy that learns has less or more work.
                    "learning_rate": 1e-7,
                    "overlap": self.overlap,
                    "lora": {"r": 8, "alpha": 16},
                },
                "rollout": {"max_completion_tokens": self.tokens, "max_model_len": longest},
                "serving": {"max_model_len": longest},
                "gate": {"max_tasks": HELD_OUT, "samples": SAMPLES},
            }
        )


class Judge:
    """Passes every second answer to a question, so that the rewards of every group differ."""

    def __init__(self, latency: float) -> None:
        self._latency, self._lock = latency, threading.Lock()
        self._answers: Counter[str] = Counter()

    @property
    def calls(self) -> int:
        return self._answers.total()

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        sleep(self._latency)
        said = [parse_sections(message["content"]) for message in request["messages"] if message["role"] == "user"]
        question = next(each["QUESTION"] for each in said if "QUESTION" in each)
        with self._lock:
            self._answers[question] += 1
            place = self._answers[question] % 2 - 1
        asked = judge.criteria_of(request)
        criteria = {name: {"reason": "It is its turn.", "choice": each[place]} for name, each in asked.items()}
        return judge.completion(judge.MODEL, json.dumps({"criteria": criteria, "check": judge.token_of(request)}), 0)


def tasks(prefix: str, first: int, count: int) -> list[RoundTask]:
    some = questions()
    random.Random(1).shuffle(some)
    return [
        RoundTask(
            task_id=f"t-{prefix}{place}",
            exchange=Exchange(question.text, "", reference="", history=()),
            prompt=chat(question.text),
            conversation=f"c-{prefix}{place}",
        )
        for place, question in enumerate(some[first : first + count])
    ]


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def with_judge(settings: Config, url: str) -> Config:
    return settings.model_copy(update={"judge": settings.judge.model_copy(update={"base_url": url})})


def endless(model: Path, folder: Path) -> str:
    """A copy of the model that ends an answer with another special token, which it never writes: every answer has the
    maximum length."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.absolute())
    added = {
        each["content"]: each["id"] for each in json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    }
    end = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    other = next(name for name in added if name != end)
    values = {"tokenizer_config.json": other, "config.json": added[other], "generation_config.json": added[other]}
    for name, value in (values | {"special_tokens_map.json": other}).items():
        if (model / name).is_file():
            changed = json.loads((model / name).read_text()) | {
                "eos_token" if isinstance(value, str) else "eos_token_id": value
            }
            (folder / name).unlink()
            (folder / name).write_text(json.dumps(changed))
    return str(folder)
