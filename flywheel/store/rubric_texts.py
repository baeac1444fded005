"""Which rubrics and judges the hashes of verdicts, rounds and calibrations stand for."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from sqlalchemy import Connection
from sqlalchemy.dialects.sqlite import insert

from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.rubric.rubric_text import text_of
from flywheel.records.batch import storable
from flywheel.store.kernel.schema import judge_models, rubric_texts
from flywheel.store.kernel.transitions import utcnow


def record_rubric(conn: Connection, rubric: Rubric) -> None:
    """Store the text of a rubric that is used, unless it is there."""
    values = {
        "hash": rubric.hash,
        "rubric_id": storable(rubric.id),
        "version": str(rubric.version),
        "text": storable(text_of(rubric)),
        "first_used_at": utcnow(),
    }
    conn.execute(insert(rubric_texts).values(**values).on_conflict_do_nothing())


def record_judge(conn: Connection, judge_hash: str, model: str, base_url: str) -> None:
    """Store which model a judge's hash stands for, and its endpoint without credentials, unless it is there."""
    url = urlsplit(base_url)
    endpoint = urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
    values = {"hash": judge_hash, "model": storable(model), "endpoint": storable(endpoint), "first_used_at": utcnow()}
    conn.execute(insert(judge_models).values(**values).on_conflict_do_nothing())
