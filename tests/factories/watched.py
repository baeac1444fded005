"""Two versions of which the new one is watched, and the conversations that they answered."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Connection, select

from flywheel.config.file import Config
from flywheel.daemon.deployer import Deployer
from flywheel.daemon.promotion_watch import PromotionWatch
from flywheel.records.request_id import new_request_id
from flywheel.serving.calls.call_log import RecordedCall, call_log_copy_path
from flywheel.sources.call_puller import CallLogCopy
from flywheel.store import deployments
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import accepted, judge_all, rejected
from tests.sources.calls.recorded import assistant, chat, completion, recorded, user

INSTANCE = "0" * 16
GOOD, BAD = "good", "bad"


@dataclass
class Watched:
    """Two versions, of which the new one, r0002, is watched, on two replicas."""

    store: Store
    config: Config
    numbers: int = 0
    replies: int = 0

    @property
    def deployer(self) -> Deployer:
        return Deployer(self.store, self.config)

    def watch(self, **settings: Any) -> PromotionWatch:
        """As another process has it."""
        deploy = self.config.deploy.model_copy(update={"watch": self.config.deploy.watch.model_copy(update=settings)})
        return PromotionWatch(self.store, self.config.model_copy(update={"deploy": deploy}), self.deployer)

    async def row(self) -> Any:
        return (await self.store.read(lambda conn: conn.execute(select(schema.watches)).all()))[-1]

    async def serving(self) -> tuple[str | None, bool]:
        """What is deployed, and whether another version answers a share."""
        active = await self.store.read(deployments.active, "agent")
        assert active is not None
        return active.adapter, active.ab_test is not None

    def call(self, arm: str, unit: int | None = None, **values: Any) -> RecordedCall:
        """A call of a unit, which began just now."""
        self.numbers += 1
        unit = self.numbers if unit is None else unit
        version = values.pop("version", "agent@r0002" if arm == "new" else "agent@r0001")
        answer = values.pop("answer", completion(assistant("7")))
        made = recorded(chat([user("1 + 1?")]), answer, request_id=new_request_id(INSTANCE, version), version=version)
        now = time.time_ns()
        defaults = {
            "started_ns": now,
            "ended_ns": now,
            "unit": f"{unit:016x}",
            "arm": arm,
            "unit_kind": "conversation",
        }
        return replace(made, **{**defaults, **values})

    def pull(self, *calls: RecordedCall) -> None:
        with closing(CallLogCopy(call_log_copy_path(self.config.state_dir))) as copy:
            copy.append(calls)

    async def answered(self, arm: str, quality: str, count: int = 1, **values: Any) -> None:
        """So many conversations whose first reply is judged good or bad."""
        calls = [self.call(arm, **values) for _ in range(count)]
        self.pull(*calls)
        await self.store.write(self._judged, calls, quality)

    def _judged(self, conn: Connection, calls: list[RecordedCall], quality: str) -> None:
        for each in calls:
            self.replies += 1
            put_replies(conn, reply(self.replies, calls=(each.request_id,)))
        judge_all(conn, lambda _: accepted() if quality == GOOD else rejected())
