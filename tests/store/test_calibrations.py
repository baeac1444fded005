"""Calibrations: what is kept, and when a rubric may not be trained on."""

from __future__ import annotations

from typing import Any

from flywheel.store import calibrations
from flywheel.store.kernel.database import Store


async def record(store: Store, rubric: str = "r1", judge: str = "j1", kappa: float | None = 0.7) -> None:
    values: dict[str, Any] = {"kappa_low": 0.5, "kappa_high": 0.8} if kappa is not None else {}
    await store.write(
        calibrations.record,
        rubric_id="qa", rubric_hash=rubric, judge_hash=judge, judge_model="m", n=40, undecided=1,
        agreement=0.85, kappa=kappa, **values,
    )  # fmt: skip


async def test_a_rubric_may_be_trained_on_when_its_own_calibration_reaches_the_bar(store: Store) -> None:
    async def shortfall(bar: float | None, rubric: str = "r1", judge: str = "j1") -> str | None:
        return await store.read(calibrations.shortfall, rubric, judge, bar)

    assert await shortfall(None) is None
    assert "the rubric is not calibrated: run `flywheel rubric calibrate`" in str(await shortfall(0.6))
    await record(store)
    assert await shortfall(0.6) is None
    assert await shortfall(0.7) is None
    assert "kappa of the rubric is 0.70 (40 labels" in str(await shortfall(0.8))
    assert "not what was calibrated" in str(await shortfall(0.6, rubric="r2"))
    assert "with another judge" in str(await shortfall(0.6, judge="j2"))


async def test_the_last_calibration_counts(store: Store) -> None:
    await record(store, kappa=0.9)
    await record(store, kappa=0.2)
    assert "0.20" in str(await store.read(calibrations.shortfall, "r1", "j1", 0.6))
    await record(store, kappa=None)
    assert "not defined" in str(await store.read(calibrations.shortfall, "r1", "j1", 0.6))
    row = await store.read(calibrations.newest, "r1", "j1")
    assert row is not None
    assert (row.kappa, row.n, row.rubric_id, row.judge_model) == (None, 40, "qa", "m")
