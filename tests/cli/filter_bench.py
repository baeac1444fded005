"""A state with tasks, a rubric and a judge, for tests of `flywheel filter`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cli.conftest import Ran, Run
from tests.factories.judge_server import JudgeServer

CRITERIA: list[dict[str, Any]] = [
    {"id": "boxed", "type": "regex", "value": "boxed", "weight": 1},
    {"id": "correct", "value": "It is right.", "weight": 3},
    {"id": "clear", "value": "It is clear.", "weight": 1},
]


def says(question: str, answer: str) -> bool:
    """Truth enough: answers that say so are good."""
    return bool(question) and "good" in answer


def changed(**values: dict[str, Any]) -> list[dict[str, Any]]:
    """The criteria, some of them with other values."""
    return [{**criterion, **values.get(criterion["id"], {})} for criterion in CRITERIA]


@dataclass
class Bench:
    """`say` gives the criteria of which the judge thinks otherwise than `says`."""

    flywheel: Run
    folder: Path
    judge: JudgeServer

    def __post_init__(self) -> None:
        self.settings: dict[str, Any] = {"max_thread": 4, "max_attempts": 1}
        self.chain: list[dict[str, Any]] = []
        self._told = 0
        self.rubric()

    def lines(self, *answers: str) -> None:
        made = [
            {"main_query": f"What is {n} plus 1?", "answer": answer, "task_id": f"a-task-with-a-long-name-{n}"}
            for n, answer in enumerate(answers, self._told)
        ]
        self._told += len(answers)
        with (self.folder / "source.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in made)

    def rubric(self, criteria: list[dict[str, Any]] | None = None, name: str = "rubric.yaml", **values: Any) -> Path:
        rubric = {"id": "r", "threshold": 0.7, "criteria": criteria or CRITERIA, **values}
        path = self.folder / name
        path.write_text(yaml.safe_dump(rubric))
        return path

    def __call__(self, command: str, *arguments: str | Path) -> Ran:
        config: dict[str, Any] = {
            "sources": [{"type": "jsonl", "path": "source.jsonl"}],
            "state": {"dir": "state"},
            "judge": {"base_url": self.judge.base_url, "model": "judge", **self.settings},
            "filter": {"rubric": "rubric.yaml"},
        }
        if self.chain:
            (self.folder / "chain.yaml").write_text(yaml.safe_dump({"id": "c", "filters": self.chain}))
            config["filter"]["chain"] = "chain.yaml"
        path = self.folder / "flywheel.yaml"
        path.write_text(yaml.safe_dump(config))
        return self.flywheel(command, "-c", path, *arguments)

    def filter(self, *arguments: str | Path) -> Any:
        ran = self("filter", *arguments, "--json")
        assert ran.code == 0, ran.err
        return ran.json

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def asked(self, since: int = 0) -> list[list[str]]:
        """The criteria of each call."""
        return [
            list(request["response_format"]["json_schema"]["schema"]["properties"]["criteria"]["properties"])
            for request in self.judge.requests[since:]
        ]
