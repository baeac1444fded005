"""With a `pii` filter, personal data is in no file that Flywheel writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flywheel.config.file import parse
from flywheel.sources.ingestion import Ingestion
from flywheel.store.kernel.database import Store
from flywheel.store.views import balance
from tests.sources.studio.writer import DATA, labels


@pytest.mark.slow
async def test_no_file_of_ours_holds_personal_data(tmp_path: Path) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text(json.dumps({"id": "private", "filters": [{"type": "pii", "params": {"action": "redact"}}]}))
    config = parse(
        {
            "state": {"dir": "state"},
            "sources": [{"path": str(DATA / "new_v2.sqlite")}, {"path": str(DATA / "old.sqlite")}],
            "filter": {"chain": str(chain)},
        },
        "test",
        tmp_path,
    )
    store = await Store.open(config.state_dir)
    ingestion = Ingestion(store, config)
    for final in (True, True):
        reports = await ingestion.run(final=final, sweep=True)
    assert [report.error for report in reports] == [None, None]
    assert (await store.read(balance.balance)).balanced
    await ingestion.close()
    await store.close()
    # Names and addresses of machines are not what the filter looks for.
    found = [
        piece
        for name in ("new_v2", "old")
        for label in labels(name)
        for piece in label.get("pii") or ()
        if not re.fullmatch(r"[A-Za-z ]+|(\d{1,3}\.){3}\d{1,3}", piece)
    ]
    assert len(found) > 5
    written = b"".join(path.read_bytes() for path in config.state_dir.rglob("*") if path.is_file())
    assert [piece for piece in found if piece.encode() in written] == []
    lines = [json.loads(line) for line in config.task_file.read_text().splitlines()]
    assert any("[EMAIL_1]" in line["main_query"] + line["answer"] for line in lines)
