"""What the process lacks is said with what to raise. It is no defect, and no fault of the work that met it."""

from __future__ import annotations

import errno
import logging
from functools import partial
from typing import Any

import pytest

from flywheel.daemon.stage import Stage
from flywheel.errors import FilterError, StoreError
from flywheel.judge.filters.chain import LineFilter
from flywheel.system.shortage import shortage_of
from flywheel.system.signals import Stop
from tests.waiting import until


def test_what_is_missing_is_found_behind_other_errors() -> None:
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT):
        try:
            try:
                raise OSError(number, "x")
            except OSError:
                raise StoreError("write", "it failed") from None
        except StoreError as error:
            found = shortage_of(error)
        assert found is not None and found[1].endswith(".")
    assert shortage_of(OSError(errno.EACCES, "x")) is None
    assert shortage_of(ValueError("x")) is None


def test_a_filter_that_could_not_run_decides_nothing() -> None:
    def keep(line: Any) -> tuple[bool, str]:
        raise OSError(errno.EMFILE, "x")

    with pytest.raises(FilterError, match=r"too many open files.*LimitNOFILE") as caught:
        LineFilter("own", keep).decide({})
    assert caught.value.retryable


def at_most(found: list[Any], number: int) -> bool:
    return len(found) <= number


async def test_a_stage_says_once_what_is_missing_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception | None] = [OSError(errno.ENOSPC, "x"), OSError(errno.ENOSPC, "x"), None]
    stop = Stop()

    async def action() -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    stage = Stage("own", action)
    caplog.set_level(logging.INFO)
    stage.begin(stop)
    for left in (2, 1, 0):
        stage.wake()
        await until(partial(at_most, errors, left), "the stage's action")
    await until(lambda: stage.task is None, "its end")
    [said] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "cannot run own: no space left on device. Free some space" in said.message and said.exc_info is None
