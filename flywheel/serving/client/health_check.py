"""Inspection of replicas: what they serve, and their condition."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from flywheel.errors import ServeError
from flywheel.serving.client.replica_client import Replica, every
from flywheel.serving.client.replica_condition import Condition
from flywheel.serving.client.swap_report import ReplicaReport, SwapReport


async def ask(replicas: Sequence[Replica], alias: str) -> None:
    """Raise ServeError when a replica cannot report what it serves."""
    await every([replica.alias(alias) for replica in replicas])


async def look(replicas: Sequence[Replica], alias: str) -> SwapReport:
    """Reports on replicas before anything was deployed: servers that wait are told that the base model answers, and
    nothing else is changed. Raises nothing."""

    async def look_at(replica: Replica) -> ReplicaReport:
        try:
            found = await replica.alias(alias)
            if found.waiting and found.target == found.base_model:
                await replica.flip(alias, found.target, found.target)
        except ServeError as error:
            return ReplicaReport.failed(replica.url, error)
        if found.target != found.base_model:
            unknown = ServeError(
                f"account for {found.target} on {replica.url}",
                f"{alias} stands for it there, and by this state nothing was ever deployed",
                "If another state deployed it, set state.dir to that one; else let the base model answer: "
                "`flywheel deploy base`.",
            )
            return ReplicaReport.failed(replica.url, unknown, serves=found.serves, wanted=found.base_model)
        return await if_healthy(replica, ReplicaReport(replica.url, found.target, serves=found.target))

    return SwapReport(alias, "", tuple(await asyncio.gather(*map(look_at, replicas))))


async def if_healthy(replica: Replica, report: ReplicaReport) -> ReplicaReport:
    """The report; for a replica whose engine is dead, that condition."""
    if report.error or not await replica.is_down():
        return report
    error = ServeError(f"use {replica.url}", "it is not healthy", "Look at its log; restart it if its engine died.")
    return dataclasses.replace(report, error=str(error), condition=Condition.UNREACHABLE)
