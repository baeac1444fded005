"""Changed settings for models hold for what was read before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from flywheel.config.file import Config
from flywheel.daemon.configured_source import apply_model_rules
from flywheel.records import exclusion
from flywheel.store import samples
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from tests.factories.config import make_config
from tests.factories.trace import put_replies, reply


def made(tmp_path: Path, *models: dict[str, Any], alias: str = "my-agent") -> Config:
    """Sources `0.sqlite`, `1.sqlite`, … with their rules."""
    sources = [{"path": f"{number}.sqlite", "models": rules} for number, rules in enumerate(models)]
    return make_config(tmp_path, sources=sources, model={"alias": alias, "base": "/models/base"})


def put(conn: Connection, path: Path, first: int, config: Config, number: int) -> None:
    replies = [reply(first + place, model=name) for place, name in enumerate(("my-agent", "gpt-4o", "qwen-max"))]
    replies.append(reply(first + 3, model="gpt-4o", prompt_reason=exclusion.NOT_RECORDED))
    put_replies(conn, *replies, source=str(path), models=config.models_of(config.sources[number]))


def excluded(conn: Connection) -> list[str]:
    return list(conn.execute(select(schema.tasks.c.excluded).order_by(schema.tasks.c.id)).scalars())


async def test_changed_rules_hold_for_what_is_stored(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_PAGE", 3)
    config = made(tmp_path, {}, {"include": ["gpt-*"]})
    for number in (0, 1):
        await store.write(put, tmp_path / f"{number}.sqlite", 10 * number, config, number)
    first, second = ["", "model", "model", "inexact model"], ["", "", "model", "inexact"]
    assert await store.read(excluded) == first + second
    await apply_model_rules(store, config)
    assert await store.read(excluded) == first + second
    await apply_model_rules(store, made(tmp_path, {"include": ["*"]}, {"include": ["*"], "exclude": ["my-agent"]}))
    assert await store.read(excluded) == ["", "", "", "inexact", "model", "", "", "inexact"]
    await apply_model_rules(store, made(tmp_path, {}, alias="gpt-4o"))
    assert await store.read(excluded) == 2 * ["model", "", "model", "inexact"]


async def test_rules_that_hold_are_not_applied_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await apply_model_rules(store, made(tmp_path, {}))
    monkeypatch.setattr(samples, "apply_model_rules", None)
    await apply_model_rules(store, made(tmp_path, {}))


async def test_a_task_of_two_sources_is_taken_when_one_of_them_takes_it(tmp_path: Path, store: Store) -> None:
    config = made(tmp_path, {}, {"include": ["*"]})
    for number in (0, 1):
        await store.write(put, tmp_path / f"{number}.sqlite", 0, config, number)
    await apply_model_rules(store, config)
    assert await store.read(excluded) == ["", "", "", "inexact"]
