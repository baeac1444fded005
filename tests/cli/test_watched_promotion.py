"""What people see of a promotion that is watched: `status`, `why`, metrics and the page of the deployment."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection

from flywheel.daemon.watch_figures import figures_of
from flywheel.records.states import RoundState, WatchState
from flywheel.store import watches
from flywheel.store.watches import Outcome, Result, UnitCall
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.factories.round import comparison, put_deployment, put_tested_round
from tests.factories.state import write_state
from tests.factories.web import client

GOOD, BAD = Outcome(Result.SUCCESS, "accepted"), Outcome(Result.FAILURE, "rejected")
LOST = Outcome(Result.MISSING, "the client disconnected before the end")


def put_watch(conn: Connection, directory: Path) -> None:
    """r0002 is watched beside r0001: 6 of 8 good against 9 of 10, others missing, waiting or not tested."""
    for number in (1, 2):
        put_tested_round(conn, number, RoundState.PROMOTED, directory, comparison())
    ab_test = {"other": "r0001", "share": 0.5, "salt": "s"}
    put_deployment(conn, "r0002", "r0002: better", previous="r0001", ab_test=ab_test)
    watch = watches.follow(conn, "agent")
    assert watch is not None
    arms = ["old"] * 11 + ["new"] * 10 + [""]
    versions = {"old": "agent@r0001", "new": "agent@r0002", "": "agent@r0002"}
    calls = [
        UnitCall(n, f"call-{n}", f"{n:016x}", arm, "conversation", versions[arm], n, n) for n, arm in enumerate(arms)
    ]
    found = [GOOD] * 9 + [BAD] + [None] + [GOOD] * 6 + [BAD] * 2 + [LOST] * 2 + [None]
    outcomes = {call.unit: each for call, each in zip(calls, found, strict=True) if each is not None}
    watches.enter(conn, watch.id, calls, outcomes, read_to=22, now_ns=60 * 10**9)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_state(tmp_path / "state", put_watch, tmp_path / "rounds")
    return write_config(tmp_path, sources=[], model={"alias": "agent", "base": "a/base"})


def test_status_shows_both_versions_and_what_could_be_noticed(flywheel: Run, config: Path) -> None:
    told = flywheel("status", "-c", config)
    assert told.code == 0, told.err
    assert "r0002 75 % of 8 conversations (2 missing) against r0001 90 % of 10 conversations; e-value" in told.out
    assert "a loss of" in told.out or "no loss could have been noticed yet" in told.out
    own = flywheel("status", "-c", config, "--json").json["watch"]
    assert (own["adapter"], own["other"], own["share"], own["state"]) == ("r0002", "r0001", 0.5, "watching")
    new, old = own["figures"]["new"], own["figures"]["old"]
    assert (new["units"], new["outcomes"], new["successes"], new["missing"], new["waiting"]) == (10, 8, 6, 2, 0)
    assert (old["units"], old["outcomes"], old["successes"], old["missing"], old["waiting"]) == (11, 10, 9, 0, 1)
    assert new["reasons"] == {"rejected": 2, "the client disconnected before the end": 2}
    assert old["median_delay_seconds"] == 60.0
    assert own["figures"]["untested"] == 1


def test_the_page_of_the_deployment_has_the_figures_while_it_is_watched_and_afterwards(
    flywheel: Run, config: Path, tmp_path: Path
) -> None:
    from flywheel.config.file import load

    http = client(load(config))
    page = http.get("/deployments/1").text
    section = page[page.index('id="watch"') :]
    for text in (
        "watching",
        "r0002",
        "r0001",
        "75 %",
        "90 %",
        "E-value",
        "is rolled back at 25",
        "is rolled back at 100",
    ):
        assert text in section, text
    assert "1 conversation goes on after a response" in section

    def end(conn: Connection) -> None:
        watch = watches.current(conn, "agent")
        assert watch is not None
        watches.begin_rollback(conn, watch, "worse in traffic: <b>x</b>", figures_of(conn, watch))
        watch = watches.current(conn, "agent")
        assert watch is not None
        watches.end(conn, watch, WatchState.ROLLED_BACK, watch.reason)

    write_state(tmp_path / "state", end)
    page = client(load(config)).get("/deployments/1").text
    section = page[page.index('id="watch"') :]
    assert "rolled_back" in section and "75 %" in section
    assert "worse in traffic: &lt;b&gt;" in section
    told = flywheel("why", "r0002", "-c", config)
    assert "watched beside r0001 until" in told.out and "rolled_back – worse in traffic" in told.out
    assert flywheel("status", "-c", config, "--json").json["watch"] is None
