"""Tasks to judge, and a configuration with their judge and rubric."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from flywheel.config.file import Config
from flywheel.store.kernel.database import Store
from tests.factories.config import make_config, write_yaml
from tests.factories.judge_server import JudgeServer
from tests.factories.task import task_states
from tests.factories.trace import put_replies, reply

RUBRIC: dict[str, Any] = {"id": "r", "threshold": 0.7, "criteria": [{"id": "correct", "value": "It is right."}]}


def config(folder: Path, judge: JudgeServer, rubric: dict[str, Any] = RUBRIC, **settings: Any) -> Config:
    write_yaml(folder / "rubric.yaml", rubric)
    daemon = settings.pop("daemon", {})
    own = {"base_url": judge.base_url, "model": "j", "max_attempts": 2, "max_thread": 4, **settings}
    return make_config(folder, filter={"rubric": "rubric.yaml"}, judge=own, daemon=daemon)


async def tell(store: Store, number: int) -> None:
    await store.write(put_replies, *(reply(n) for n in range(number)))


async def states(store: Store) -> Counter[str]:
    return Counter(await store.read(task_states))
