"""The pages of rubrics, in a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, insert, select

from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store import calibrations, ledger, verdicts
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import judge_models, rubric_texts, tasks
from flywheel.web.rubrics import Line, difference
from tests.samples import batch, reply
from tests.web.conftest import Check, Visitor, serving
from tests.web.recorded_state import HOSTILE, config_of, in_thread

OLD, NEW, UNKNOWN = "aaaa000011112222", "bbbb000011112222", "cccc000011112222"
LINES = [f"line {number}" for number in range(30)]
FLIPPED = 3


def verdict(outcome: Outcome, choice: str, score: float) -> Verdict:
    is_met = outcome is Outcome.ACCEPTED
    results = (CriterionResult("correct", choice, score, is_met, HOSTILE), CriterionResult("kind", "yes", 1.0, True))
    return Verdict(outcome, score, results, f"because {HOSTILE}", calls=1)


def put(conn: Connection) -> None:
    """Two versions of a hostile rubric, which decided three of ten tasks differently, and one without a text."""
    replies = [reply(number, query=f"Question {number} {HOSTILE}") for number in range(10)]
    ledger.record_batch(conn, ledger.source_id(conn, "/a"), batch(*replies), train_ratio=0.7, split_seed=42)
    name = f"qa {HOSTILE}"
    text = "\n".join([*LINES, HOSTILE])
    for rubric, each, at in ((OLD, text, "2026-11-20"), (NEW, text.replace("line 20", "line twenty"), "2026-11-21")):
        row = {
            "hash": rubric,
            "rubric_id": name,
            "version": "1",
            "text": each,
            "first_used_at": f"{at}T10:00:00+00:00",
        }
        conn.execute(insert(rubric_texts), row)
    judge = {"hash": "judge-1", "model": f"alien {HOSTILE}", "endpoint": HOSTILE, "first_used_at": "2026-11-20T10:00"}
    conn.execute(insert(judge_models), judge)
    for number, task in enumerate(conn.execute(select(tasks.c.id).order_by(tasks.c.id)).scalars().all()):
        verdicts.store(conn, task, verdict(Outcome.REJECTED, f"no {HOSTILE}", 0.2), OLD, "judge-1")
        now = Outcome.ACCEPTED if number < FLIPPED else Outcome.REJECTED
        verdicts.store(conn, task, verdict(now, "yes", 0.9), NEW, "judge-1" if number else "judge-2")
        verdicts.store(conn, task, verdict(Outcome.ACCEPTED, "yes", 1.0), f"{verdicts.CHAIN}f", "judge-1")
    verdicts.store(conn, 1, verdict(Outcome.ACCEPTED, "yes", 1.0), UNKNOWN, "judge-1")
    for rubric, kappa in ((OLD, 0.41), (NEW, 0.83), (NEW, None)):
        calibrations.record(
            conn, rubric_id=name, rubric_hash=rubric, judge_hash="judge-1", judge_model=HOSTILE, n=40, undecided=2,
            agreement=0.9, kappa=kappa, kappa_low=kappa and kappa - 0.2, kappa_high=kappa and kappa + 0.1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of pages of a state with three versions."""
    config = config_of(tmp_path_factory.mktemp("rubrics"), judge={"min_kappa": 0.6})

    async def make() -> None:
        store = await Store.open(config.state_dir)
        try:
            await store.write(put)
        finally:
            await store.close()

    in_thread(make())
    with serving(config) as address:
        yield address


def test_versions_with_their_difference_and_what_flipped(check: Check, judged: str) -> None:
    page = check(f"{judged}/rubrics")
    assert page.locator(".versions tbody tr").count() == 3
    assert "+1 −1" in page.inner_text("main")
    assert "✓ at least 0.60" in page.inner_text("main")
    assert "✗ below 0.60" in page.inner_text("main")
    assert page.locator("main script, main img, main iframe").count() == 0
    page.get_by_role("link", name=NEW, exact=True).click()
    page = check(page.url)
    text = page.inner_text("main")
    assert "Of 10 replies that both versions judged, 3 (30 %) got another decision. 1 of them were judged" in text
    assert page.locator("#flips .list tbody tr").count() == FLIPPED
    assert page.locator("#flips .list tbody tr").first.inner_text().startswith("was rejected, is now")
    assert page.locator(".difference .added").inner_text().split() == ["21", "+", "added", "line", "twenty"]
    assert page.locator(".difference .removed").count() == 1
    assert "Cohen's kappa" in text
    assert "0.83 0.63 to 0.93" in text
    assert page.locator("main script, main img, main iframe").count() == 0
    assert "\u202e" not in page.content()


def test_any_two_versions_are_compared_without_scripts(visitor: Visitor, judged: str) -> None:
    page = visitor.open(f"{judged}/rubrics/{NEW}", scripts=False)
    page.get_by_label("Compare with").select_option(UNKNOWN)
    page.get_by_role("button", name="Compare").click()
    assert page.url.endswith(f"?with={UNKNOWN}")
    assert "The text of the other version was not recorded." in page.inner_text("main")
    assert "Of 1 reply that both versions judged, 0 (0 %) got another decision." in page.inner_text("main")


def test_a_real_run_and_an_empty_state(check: Check, address: str, empty_address: str) -> None:
    page = check(f"{address}/rubrics")
    page.locator(".versions a").first.click()
    check(page.url)
    assert "flywheel filter" in check(f"{empty_address}/rubrics").inner_text("main")


def test_a_difference_leaves_out_what_is_far_from_changes() -> None:
    found = difference("\n".join(LINES), "\n".join([*LINES[:10], "new", *LINES[10:]]))
    assert [line.kind for line in found] == ["left out", *["same"] * 3, "added", *["same"] * 3, "left out"]
    assert found[0].text == "7 unchanged lines"
    assert found[4] == Line("added", "new", None, 11)
    assert found[-1].text == "17 unchanged lines"
    assert difference("same", "same") == []
    assert [line.kind for line in difference("a", "b")] == ["removed", "added"]
