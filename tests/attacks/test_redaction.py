"""Texts that try to stop the redaction of personal data, and with it the source that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.config.file import Config, parse
from flywheel.daemon.status import snapshot
from flywheel.judge.filters.pii import Pii
from flywheel.records.task import task_line
from flywheel.sources import ingestion
from flywheel.sources.ingestion import Ingestion
from flywheel.store import dead_letters
from flywheel.store.kernel.database import Store
from flywheel.store.views import balance
from tests.factories.daemon import running
from tests.factories.trace import reply
from tests.waiting import until

ADDRESS = "jane.doe@example.org"
NESTED = "[" * 60_000 + "]" * 60_000
TEXTS = {
    "a placeholder of 5,000 digits": f"[EMAIL_{'9' * 5_000}]",
    "placeholders of many digits": "[EMAIL_999999999] [PHONE_9999999999] [CARD_99999999999999999999]",
    "a placeholder in digits of other scripts": "[EMAIL_٩٩٩] [EMAIL_²] [EMAIL_᠙]",
    "a number of 5,000 digits": f"call +{'9' * 5_000}, card {'4' * 5_000}, IBAN DE{'1' * 5_000}",
    "an IBAN in digits of other scripts": "DE٨٩٣٧٠٤٠٠٤٤٠٥٣٢٠١٣٠٠٠",
    "nested JSON": NESTED,
    "JSON of a long number": f'{{"phone": {"9" * 5_000}}}',
    "JSON of no number": '{"phone": NaN, "card": -Infinity, "x": 1e999}',
    "keys without an end": "-----BEGIN PRIVATE KEY-----" * 2_000,
    "signs of addresses": "@" * 5_000 + "a@" * 5_000 + "a." * 5_000,
    "a lone surrogate": "\ud800 jane\udfff@example.org",
}
pieces = st.sampled_from(
    [*(text[:40] for text in TEXTS.values()), "[EMAIL_", "[PRIVATE_KEY_1]", "]", "9" * 30, "+49 ", "(", "00", "sk-",
     "DE89", "4111 ", "api_key: ", "data:image/png;base64,", "\0", "\u2028", "٣", "{", '"', "\\", "@example.org "]
)  # fmt: skip
texts = st.lists(pieces | st.text(max_size=20), max_size=20).map("".join)
values = st.recursive(
    texts | st.integers() | st.floats() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(query=texts, answer=texts, content=values, tools=values)
def test_no_text_breaks_the_redaction(query: str, answer: str, content: Any, tools: Any) -> None:
    history = ({"role": "user", "content": content},)
    line = task_line(reply(1, query=query, answer=answer, history=history), "/a")
    line["metadata"]["tools_json"] = json.dumps(tools)
    for pii in (Pii(), Pii(action="reject")):
        redacted = pii.redactor()(line)
        assert redacted.keys() == line.keys()
        pii.keep(redacted)


def configured(folder: Path, *questions: str) -> Config:
    lines = [{"question": question, "answer": f"ask {ADDRESS}", "tools": NESTED} for question in questions]
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "chain.yaml").write_text("{id: private, filters: [{type: pii}]}")
    raw = {
        "sources": [{"type": "jsonl", "path": "lines.jsonl"}],
        "state": {"dir": "state"},
        "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "j", "max_attempts": 1},
        "serving": {"urls": ["http://127.0.0.1:9"]},
        "filter": {"chain": "chain.yaml"},
        "ingest": {"settle_seconds": 0, "poll_seconds": 0.1},
        "daemon": {"metrics": "127.0.0.1:0", "drain_seconds": 1},
    }
    return parse(raw, "test", folder)


async def ingested(config: Config) -> tuple[Store, ingestion.SourceReport]:
    store = await Store.open(config.state_dir)
    reading = Ingestion(store, config)
    [report] = await reading.run(final=True)
    await reading.close()
    return store, report


async def test_no_text_stops_its_source(tmp_path: Path) -> None:
    config = configured(tmp_path, *TEXTS.values(), "What is 1 + 1?")
    store, report = await ingested(config)
    assert (report.error, report.counts.tasks, report.counts.dead) == (None, len(TEXTS) + 1, 0)
    assert (await store.read(balance.balance)).balanced
    await store.close()
    assert ADDRESS not in config.task_file.read_text()


async def test_an_entry_that_cannot_be_redacted_is_its_own_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Pii.find

    def breaks(self: Pii, text: str) -> Any:
        if "the secret" in text:
            raise ValueError(f"it broke at {text!r}")
        return find(self, text)

    monkeypatch.setattr(Pii, "find", breaks)
    config = configured(tmp_path, "What is 1 + 1?", f"Tell {ADDRESS} the secret", "What is 2 + 2?")
    with (tmp_path / "lines.jsonl").open("a") as lines:
        lines.write("the secret, which is no JSON\n")
    store, report = await ingested(config)
    assert (report.error, report.counts.tasks, report.counts.dead) == (None, 2, 2)
    assert (await store.read(balance.balance)).balanced
    letters = await store.read(dead_letters.in_states, [dead_letters.DeadLetterState.OPEN])
    assert {letter.error for letter in letters} == {
        "the filter pii cannot redact it (ValueError): nothing of its text is stored"
    }
    await store.close()
    written = b"".join(path.read_bytes() for path in config.state_dir.rglob("*") if path.is_file())
    assert b"the secret" not in written


async def test_a_source_that_a_defect_stops_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mended = ingestion.redacted

    def broken(*_: Any) -> Any:
        raise OverflowError("int too large to convert")

    monkeypatch.setattr(ingestion, "redacted", broken)
    config = configured(tmp_path, "What is 1 + 1?")
    store, report = await ingested(config)
    assert report.error is not None, "the command fails without a traceback"
    assert "a defect of Flywheel stopped it (OverflowError)" in str(report.error)
    [source] = (await store.read(snapshot, config))["sources"]
    assert (source["condition"], source["error"]) == ("defect", str(report.error))

    await store.close()

    async with running(config) as (service, client):
        await until(service._sources.concern, "the defect")
        answer = await client.get("/healthz")
        concern = "1 of the sources cannot be read because of a defect: see `flywheel status`\n"
        assert (answer.status_code, answer.text) == (200, concern)
        assert (await client.get("/readyz")).text == "ok\n"
        monkeypatch.setattr(ingestion, "redacted", mended)
        await until(lambda: not service._sources.concern(), "the next pass")
        assert (await client.get("/healthz")).text == "ok\n"
    store = await Store.open(config.state_dir)
    [source] = (await store.read(snapshot, config))["sources"]
    assert (source["condition"], source["tasks"]) == ("ok", 1)
    await store.close()
    tracebacks = [record for record in caplog.records if record.exc_info and "OverflowError" in record.getMessage()]
    assert len(tracebacks) <= 2, "of the command and of the daemon, not of each pass"
