"""Progress where there is no terminal: a line now and then, and none when nobody should see it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from flywheel.cli import progress_bars
from flywheel.cli.progress_bars import of_tasks


def test_a_line_says_how_far_how_fast_and_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    with of_tasks("judging", 3_000) as step:
        step()
        step()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"(judging: [12] of 3,000, [\d,.]+/(s|min), [\w ]+ left\n){2}", err)


def test_lines_are_rare_and_a_quiet_one_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with of_tasks("judging", 3) as step:
        step()
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    with of_tasks("judging", 3, quiet=True) as step:
        step()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "told"), [(0.0001, "10,000/s"), (0.4, "2.5/s"), (2.0, "30/min")])
def test_rates_have_as_many_figures_as_they_are_worth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, told: str
) -> None:
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.0)
    clock = iter((0.0, seconds))
    monkeypatch.setattr(progress_bars, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with of_tasks("judging", 3) as step:
        step()
    assert f", {told}, " in capsys.readouterr().err
