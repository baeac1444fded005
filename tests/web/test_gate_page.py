"""The pages of the gate and of lineage, in a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect
from sqlalchemy import Connection, delete, insert, select

from flywheel.config.file import Config
from flywheel.records.states import RoundState, Split
from flywheel.store.deployments import BY_HAND
from flywheel.store.kernel.schema import gate_tests, round_samples, rounds, tasks
from tests.factories.round import GUARDED, comparison, criterion, put_answers, put_deployment, put_tested_round
from tests.factories.state import write_state
from tests.factories.web import client
from tests.web.conftest import NARROW, WAIT_MILLISECONDS, Visitor, serving
from tests.web.recorded_state import HOSTILE, config_of, put_held_out


def put_hostile(conn: Connection, directory: Path) -> list[str]:
    """A round whose questions, answers, criteria, reasons and deployments are hostile; the keys of its tasks."""
    keys = put_held_out(conn)
    criteria = [criterion(HOSTILE, -0.2), criterion("safe", -0.02)]
    seen = comparison(keys=keys, criteria=criteria, method=HOSTILE)
    put_tested_round(conn, 1, RoundState.REJECTED, directory, seen, gate=GUARDED)
    put_tested_round(conn, 2, RoundState.FAILED, directory, reason=HOSTILE, parent="r0001")
    put_deployment(conn, "r0001", BY_HAND, error=HOSTILE, endpoints=[HOSTILE])
    put_deployment(conn, None, HOSTILE, retired_at="2026-11-22T11:00:00", alias=HOSTILE)
    ids = conn.execute(select(tasks.c.id)).scalars()
    conn.execute(
        insert(round_samples), [{"round_id": 2, "task_id": each, "split": Split.TRAIN.value} for each in ids]
    )
    return keys


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The address of pages of a hostile state, and its tasks."""
    config = config_of(tmp_path_factory.mktemp("hostile"))
    directory = config.state_dir / "rounds"
    keys = write_state(config.state_dir, put_hostile, directory)
    put_answers(directory / "r0001", keys, text="{side} says {key} " + HOSTILE.replace("{", "{{").replace("}", "}}"))
    with serving(config) as address:
        yield address, keys


def test_hostile_texts_are_inert(visitor: Visitor, hostile: tuple[str, list[str]]) -> None:
    """Of a round that was rejected, an answer, a round that failed, a deployment that failed, and the list."""
    address, keys = hostile
    page = visitor.open(f"{address}/gate", width=NARROW)
    for path in ("/gate/r0001", f"/gate/r0001/{keys[0]}", "/gate/r0002", "/deployments/1", "/rounds/r0002", "/gate"):
        page.goto(f"{address}{path}")
        visitor.check(page)
        assert page.locator("main script, main img, main iframe").count() == 0
        assert "\u202e" not in page.content()
    visitor.check_accessibility(page)


def test_the_pages_of_a_real_run_are_whole_without_scripts(shared_state: Config) -> None:
    pages = client(shared_state)
    page = html.unescape(pages.get("/gate/r0002").text)
    assert "r0002 was promoted over r0001: better: gain +0.375" in page
    assert (page.count('<circle class="candidate"'), page.count('class="pair-of"')) == (26, 3)
    [answers, *_] = re.findall(r'class="pair-of".*?href="(/gate/r0002/[^"]+)"', page, re.S)
    assert pages.get(answers).text.count('class="sides"') == 4


def test_a_decision_appears_while_its_page_is_open(visitor: Visitor, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_state(config.state_dir, put_tested_round, 1, RoundState.TRAINING, tmp_path)

    def promote(conn: Connection) -> None:
        conn.execute(delete(gate_tests))
        conn.execute(delete(rounds))
        put_tested_round(conn, 1, RoundState.PROMOTED, tmp_path, comparison())

    with serving(config) as address:
        page = visitor.open(f"{address}/gate/r0001")
        expect(page.locator(".verdict")).to_have_text("r0001 is in training and has not been compared yet.")
        write_state(config.state_dir, promote)
        expect(page.locator(".verdict")).to_contain_text("r0001 was promoted", timeout=WAIT_MILLISECONDS)
        expect(page.locator(".evidence tbody tr")).to_have_count(3, timeout=WAIT_MILLISECONDS)
        visitor.check(page)
        # The stream ends before its server does.
        page.close()
