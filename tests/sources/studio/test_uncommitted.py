"""The marks that may not be stored yet: as many as are read ahead, and no more."""

from __future__ import annotations

from flywheel.sources.studio.reader import STEP_ROWS
from flywheel.sources.studio.uncommitted import MOST, FreshMarks
from flywheel.sources.studio_connector import AHEAD, TOGETHER
from flywheel.trace import Mark


def mark(name: object, digest: int = 0) -> Mark:
    return Mark(str(name), (1,), digest, 0, False)


def test_it_has_room_for_what_is_read_ahead() -> None:
    # Being stored, waiting, in the reader's hand and being read.
    assert (TOGETHER + AHEAD + 2) * STEP_ROWS <= MOST


def test_the_mark_that_was_added_last_counts() -> None:
    marks = FreshMarks()
    marks.add(mark("a", 1))
    marks.add(mark("a", 2))

    assert marks.get("a") == mark("a", 2)
    assert marks.get("b") is None
    marks.clear()
    assert marks.get("a") is None


def test_the_oldest_is_let_go_of() -> None:
    marks = FreshMarks()
    for number in range(MOST):
        marks.add(mark(number))
    marks.add(mark(0, 5))
    marks.add(mark("one more"))

    assert marks.get("0") == mark(0, 5)
    assert marks.get("1") is None
    assert marks.get("2") is not None
