"""Notices reach webhooks and commands: signed, in order, at least once, and without delaying the daemon."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert

from flywheel.config.file import Config, load
from flywheel.config.notices import NoticeType
from flywheel.daemon import notifier
from flywheel.daemon.notifier import NoticeTarget
from flywheel.errors import ConfigError, NotifyError
from flywheel.records.states import DeploymentState, RoundState
from flywheel.secrets import URL_USERS
from flywheel.store import deployments, ledger, notices, rounds
from flywheel.store.dead_letters import TASK, dead_letter
from flywheel.store.erasures import Kind
from flywheel.store.kernel import database, schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import create, move
from flywheel.store.stages import Pass
from tests.cli.conftest import Run
from tests.factories.config import make_config
from tests.factories.erased import erase_rows
from tests.factories.judge_server import JudgeServer
from tests.factories.local_server import JsonHandler, LocalServer
from tests.factories.state import open_state, running_daemon
from tests.factories.task import task_keys
from tests.factories.trace import put_replies, reply
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
EVERY = [kind.value for kind in NoticeType]
KEY = "a-long-random-key"


class Webhook(LocalServer):
    """Receives notices. It answers with `statuses` in turn, then with 200, and waits for `go_on` before."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        webhook = self

        class Handler(JsonHandler):
            def do_POST(self) -> None:  # noqa: N802
                body = self.rfile.read(int(self.headers["content-length"]))
                webhook.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                webhook.go_on.wait(SECONDS)
                status = webhook.statuses.pop(0) if webhook.statuses else 200
                self.send(status, b"", {"location": f"{webhook.base_url}/elsewhere", "retry-after": "60"})

        super().__init__(Handler)

    @property
    def url(self) -> str:
        return f"{self.base_url}/hidden-path"

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    def subjects(self) -> list[str]:
        return [each["subject"] for told in self.told for each in told["data"]["notices"]]

    def __exit__(self, *error: Any) -> None:
        self.go_on.set()
        super().__exit__(*error)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as webhook:
        yield webhook


def configured(folder: Path, *entries: dict[str, Any], **values: Any) -> Config:
    defaults = {
        "sources": [],
        "serving": {"urls": ["http://127.0.0.1:9"]},
        "daemon": {"metrics": None, "drain_seconds": 30},
        "ingest": {"settle_seconds": 0, "poll_seconds": 0.2},
    }
    return make_config(folder, **{**defaults, "notify": list(entries), **values})


async def begun(store: Store, config: Config) -> NoticeTarget:
    await notifier.resume(store, config)
    target = NoticeTarget(store, config, config.notify[0])
    await target.begin()
    return target


def letter(conn: Connection, subject: str, error: str = "a filter raised") -> None:
    dead_letter(conn, TASK, subject, error)


def ended(conn: Connection, name: str, state: RoundState, why: str) -> None:
    values = {"name": name, "trigger": "", "config_hash": "", "rubric_hash": "", "seed": 0, "dir": ""}
    number = create(conn, RoundState.PLANNED, **values)
    move(conn, number, RoundState.PLANNED, RoundState.TRAINING)
    move(conn, number, RoundState.TRAINING, RoundState.EVALUATING)
    move(conn, number, RoundState.EVALUATING, state, why, reason=why)


def swapped(conn: Connection, adapter: str, reason: str) -> None:
    number = deployments.request(conn, "my-agent", [], adapter, reason)
    deployments.activate(conn, number, "my-agent", {})


async def test_each_type_is_found_in_the_events(store: Store) -> None:
    def happen(conn: Connection) -> None:
        ended(conn, "r0001", RoundState.PROMOTED, "gain 0.1")
        ended(conn, "r0002", RoundState.REJECTED, "no evidence")
        ended(conn, "r0003", RoundState.FAILED, "it died")
        swapped(conn, "r0001", "r0001: gain 0.1")
        swapped(conn, "r0000", deployments.ROLLBACK)
        failed = deployments.request(conn, "my-agent", [], "r0001", deployments.ROLLBACK)
        deployments.fail(conn, failed, "no server")
        for error, spent in (("no key", False), ("no key", False), ("", False), ("spent", True), ("no key", False)):
            notices.note_judge(conn, error, spent=spent)
        letter(conn, "t-1")
        source = conn.execute(insert(schema.sources).values(path="/a.sqlite")).inserted_primary_key[0]
        for condition in ("ok", "busy", "locked", "locked", "ok", "missing"):
            ledger.note_source(conn, source, condition=condition, error=f"it is {condition}")
        ledger.note_source(conn, source, read_at="now")

    await store.write(happen)
    found, end = await store.read(notices.after, 0, frozenset(NoticeType), 1000)
    assert [(each.type.value, each.subject, each.text) for each in found] == [
        ("promoted", "r0001", "r0001 is promoted: gain 0.1"),
        ("rejected", "r0002", "r0002 is rejected: no evidence"),
        ("rolled_back", "my-agent", "my-agent was rolled back to r0000"),
        ("judge_failing", "judge", "judging is stopped: no key"),
        ("budget_spent", "judge", "judging is stopped: spent"),
        ("judge_failing", "judge", "judging is stopped: no key"),
        ("dead_letters", "t-1", "the task t-1 could not be processed: a filter raised"),
        ("source_error", "/a.sqlite", "the source /a.sqlite is locked: it is locked"),
        ("source_error", "/a.sqlite", "the source /a.sqlite is missing: it is missing"),
    ]
    assert end == await store.read(notices.newest_event)
    assert [each.id for each in found] == sorted({each.id for each in found})
    only, _ = await store.read(notices.after, 0, frozenset({NoticeType.REJECTED}), 1000)
    assert [each.subject for each in only] == ["r0002"]
    assert await store.read(database.noted, database.JUDGE_NOTE) == "no key"
    assert DeploymentState.FAILED == "failed"


async def test_a_candidate_that_waits_is_told_with_the_page_on_which_to_decide(
    store: Store, tmp_path: Path, webhook: Webhook
) -> None:
    settings = {"deploy": {"web_url": "https://flywheel.example/pages/"}}
    target = await begun(store, configured(tmp_path, {"url": webhook.url, "on": ["passed"]}, **settings))

    def waits(conn: Connection) -> None:
        values = {"name": "r0007", "trigger": "", "config_hash": "", "rubric_hash": "", "seed": 0, "dir": ""}
        number = create(conn, RoundState.PLANNED, **values)
        move(conn, number, RoundState.PLANNED, RoundState.TRAINING)
        move(conn, number, RoundState.TRAINING, RoundState.EVALUATING)
        row = rounds.by_name(conn, "r0007")
        rounds.let_wait(conn, row, "agent", "better: gain +0.1", "a person: `flywheel deploy r0007`", 3)

    await store.write(waits)
    await target.deliver()
    [told] = webhook.told
    page = "https://flywheel.example/pages/rounds/r0007"
    assert told["data"]["notices"][0]["url"] == page
    assert told["text"].endswith(
        f": r0007 passed the gate and waits for a person: `flywheel deploy r0007` (better: gain +0.1) {page}"
    )


def documented() -> Callable[[bytes, dict[str, str], bytes], bool]:
    """The function of the page that verifies a signature."""
    [code] = re.findall(
        r"```python\n(def is_from_flywheel.*?)```", (ROOT / "docs" / "operate" / "monitor.md").read_text(), re.S
    )
    names: dict[str, Any] = {"base64": base64, "hmac": hmac, "time": time}
    exec(code, names)
    return names["is_from_flywheel"]


@pytest.mark.parametrize("secret", [KEY, f"whsec_{base64.b64encode(KEY.encode()).decode()}"])
async def test_a_webhook_gets_signed_json(
    store: Store, tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("OF_THE_HOOK", secret)
    config = configured(tmp_path, {"url": webhook.url, "secret_env": "OF_THE_HOOK", "on": EVERY})
    target = await begun(store, config)
    await store.write(letter, "t-1", "an error with \u202e and \x1b[2J")
    await target.deliver()
    [(headers, body)] = webhook.got
    told = json.loads(body)
    assert set(told) == {"type", "timestamp", "text", "data"}
    assert (told["type"], told["data"]["alias"]) == ("dead_letters", "my-agent")
    [notice] = told["data"]["notices"]
    assert set(notice) == {"id", "at", "subject", "text"}
    assert notice["text"].endswith("an error with \u202e and \x1b[2J") and told["text"].endswith(notice["text"])
    assert (told["timestamp"], body.isascii()) == (notice["at"], True)
    assert headers["content-type"] == "application/json"
    verify = documented()
    assert verify(KEY.encode(), headers, body)
    assert not verify(b"another key", headers, body)
    assert not verify(KEY.encode(), headers, body.replace(b"t-1", b"t-2"))
    assert not verify(KEY.encode(), {**headers, "webhook-id": "other"}, body)
    assert not verify(KEY.encode(), {**headers, "webhook-timestamp": "1"}, body)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"secret_env": "OF_THE_HOOK"}, "with the key is not set, and nothing is sent unsigned"),
        ({"url": None, "url_env": "OF_THE_HOOK"}, "with the URL is not set"),
    ],
)
async def test_nothing_is_sent_until_the_variable_with_the_key_or_the_url_is_set(
    store: Store, tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], why: str
) -> None:
    given = {key: value for key, value in {"url": webhook.url, "on": EVERY, **entry}.items() if value is not None}
    target = await begun(store, configured(tmp_path, given))
    await store.write(letter, "t-1")
    monkeypatch.delenv("OF_THE_HOOK", raising=False)
    with pytest.raises(NotifyError, match=f"the variable OF_THE_HOOK {why}"):
        await target.deliver()
    assert webhook.got == []
    monkeypatch.setenv("OF_THE_HOOK", webhook.url)
    await target.deliver()
    assert webhook.subjects() == ["t-1"]


async def test_what_does_not_arrive_is_sent_again_unchanged_and_in_order(
    store: Store, tmp_path: Path, webhook: Webhook
) -> None:
    target = await begun(store, configured(tmp_path, {"url": webhook.url, "on": EVERY}))
    webhook.statuses = [500, 302, 410]
    await store.write(letter, "t-1")
    for number in range(2, 5):
        with pytest.raises(NotifyError, match=r"notify 127\.0\.0\.1: it answered \d+") as caught:
            await target.deliver()
        assert "hidden-path" not in str(caught.value)
        assert caught.value.retry_after == 60
        await store.write(letter, f"t-{number}")
    assert await target.deliver() is Pass.WORKED
    assert len(webhook.got) == 5
    again = webhook.got[:4]
    assert len({body for _, body in again}) == len({headers["webhook-id"] for headers, _ in again}) == 1
    assert webhook.subjects()[3:] == ["t-1", "t-2", "t-3", "t-4"]
    assert await target.deliver() is Pass.IDLE
    assert len(webhook.got) == 5, "what has arrived is not sent again"


async def test_what_was_erased_after_an_attempt_is_not_sent_by_the_next_one(
    store: Store, tmp_path: Path, webhook: Webhook
) -> None:
    target = await begun(store, configured(tmp_path, {"url": webhook.url, "on": ["dead_letters", "judge_failing"]}))
    said = "What is 1 plus 1, and why is it so?"

    def fill(conn: Connection) -> None:
        put_replies(conn, *(reply(number, conversation_id=f"talk {number}") for number in (1, 2)))
        first, second = task_keys(conn)
        letter(conn, first, f"it quotes: {said}")
        # Of another type: sent on its own, after the first.
        notices.note_judge(conn, f"it cannot read: {said}")
        letter(conn, second, f"it quotes: {said}")

    await store.write(fill)
    webhook.statuses = [500]
    with pytest.raises(NotifyError):
        await target.deliver()
    assert [said in str(told) for told in webhook.told] == [True]
    assert said not in repr(vars(target)), "the texts are in the state alone"
    await store.write(erase_rows, Kind.CONVERSATION, "talk 1")
    webhook.go_on.clear()
    sending = asyncio.create_task(target.deliver())
    await until(lambda: len(webhook.got) == 2, "the first notice again")
    await store.write(erase_rows, Kind.CONVERSATION, "talk 2")
    webhook.go_on.set()
    await sending
    assert [said in str(told) for told in webhook.told] == [True, False, False, False]
    assert len({headers["webhook-id"] for headers, _ in webhook.got[:2]}) == 1, "it is the same notice"


async def test_the_next_process_goes_on_where_the_last_one_ended(
    store: Store, tmp_path: Path, webhook: Webhook
) -> None:
    config = configured(tmp_path, {"url": webhook.url, "on": ["dead_letters"]})
    await store.write(letter, "before")
    target = await begun(store, config)
    await target.deliver()
    assert webhook.got == [], "a new target is not told of the past"
    await store.write(letter, "t-1")
    await target.deliver()
    await store.write(letter, "t-2")
    # It died before it sent the second: the next one does, and not the first again.
    await (await begun(store, config)).deliver()
    assert webhook.subjects() == ["t-1", "t-2"]

    # It dies between the answer and the note of it: at least once, under the same number.
    async def dies(position: int) -> None:
        raise asyncio.CancelledError

    await store.write(letter, "t-3")
    target = await begun(store, config)
    target._keep = dies
    with pytest.raises(asyncio.CancelledError):
        await target.deliver()
    await (await begun(store, config)).deliver()
    assert webhook.subjects() == ["t-1", "t-2", "t-3", "t-3"]
    first, second = (told["data"]["notices"] for told in webhook.told[2:])
    assert first == second


@pytest.mark.parametrize("how", ["corrected", "named", "renamed", "another", "added", "gone for a time"])
async def test_what_waits_for_an_entry_is_sent_after_its_url_is_corrected(
    store: Store, tmp_path: Path, webhook: Webhook, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    on = {"on": ["dead_letters"]}
    other = {"command": "true", "on": ["promoted"]}
    wrong, right = {"url": f"{webhook.base_url}/wrong", **on}, {"url": webhook.url, **on}
    before: list[dict[str, Any]] = [wrong, other]
    after: list[dict[str, Any]] = [right, other]
    between: list[dict[str, Any]] | None = None
    told, dropped = ["t-1", "t-2"], 0
    if how == "named":
        # The number of entries tells nothing here: the name does.
        before, after = [{"name": "team", **wrong}, other], [{"name": "team", **right}]
    elif how == "renamed":
        # A name added to an entry whose URL stays.
        before, after = [right, other], [{"name": "team", **right}]
    elif how == "another":
        before, after = [wrong], [{"name": "another", **right}]
        told, dropped = [], 2
    elif how == "added":
        after = [right, other, {"url": webhook.base_url, "on": ["promoted"]}]
        told, dropped = [], 2
    elif how == "gone for a time":
        before, between, after = [wrong], [], [right]
        told, dropped = [], 2
    await begun(store, configured(tmp_path, *before))
    for subject in ("t-1", "t-2"):
        await store.write(letter, subject)
    await store.write(ended, "r0001", RoundState.REJECTED, "not for any of them")
    if between is not None:
        await notifier.resume(store, configured(tmp_path, *between))
    await (await begun(store, configured(tmp_path, *after))).deliver()
    assert webhook.subjects() == told
    lines = [line for line in caplog.messages if "dropped" in line]
    assert lines == (["2 notices dropped: their entry of `notify` was removed"]
                     if dropped else [])  # fmt: skip


async def test_many_notices_are_few_requests(
    store: Store, tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "EVENTS_AT_ONCE", 150)
    target = await begun(store, configured(tmp_path, {"url": webhook.url, "on": ["dead_letters", "rejected"]}))

    def fill(conn: Connection) -> None:
        for number in range(250):
            letter(conn, f"t-{number}")
        ended(conn, "r0001", RoundState.REJECTED, "no evidence")
        letter(conn, "last")

    await store.write(fill)
    await target.deliver()
    assert webhook.subjects() == [*(f"t-{number}" for number in range(250)), "r0001", "last"]
    sizes = [len(told["data"]["notices"]) for told in webhook.told]
    assert max(sizes) == 100 and len(sizes) < 10
    assert webhook.told[0]["text"].endswith(
        "100 times dead_letters, first: the task t-0 could not be processed: a filter raised"
    )


async def test_a_position_that_only_other_events_moved_is_stored_too(
    store: Store, tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, {"url": webhook.url, "on": ["promoted"]})
    target = await begun(store, config)
    begin = target._position

    def fill(conn: Connection) -> None:
        for number in range(20):
            letter(conn, f"t-{number}")

    await store.write(fill)
    await target.deliver()
    assert (await begun(store, config))._position == begin, "it is seldom stored"
    monkeypatch.setattr(notifier, "STORED_AFTER", 10)
    await store.write(letter, "one more")
    await target.deliver()
    assert (await begun(store, config))._position == await store.read(notices.newest_event)
    assert webhook.got == []


SCRIPT = """
import json, os, sys, time, subprocess
told = json.load(sys.stdin)
with open(sys.argv[1], "a") as file:
    seen = {"type": os.environ["FLYWHEEL_NOTICE"], "key": os.environ.get("OPENAI_API_KEY")}
    print(json.dumps({"told": told, **seen}), file=file)
if sys.argv[2] == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[1] + ".child", "w").write(str(child.pid))
    time.sleep(600)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], list[str]]:
    script = tmp_path / "a script.py"
    script.write_text(SCRIPT)
    return lambda how: [sys.executable, str(script), str(tmp_path / "out"), how]


@pytest.mark.slow
async def test_a_command_gets_the_notice_and_no_key(
    store: Store, tmp_path: Path, command: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    target = await begun(
        store, configured(tmp_path, {"command": command("0"), "on": EVERY, "timeout_seconds": SECONDS})
    )
    await store.write(letter, "t-1", "it said sk-0123456789 and $(reboot)")
    await target.deliver()
    await target.deliver()
    [line] = (tmp_path / "out").read_text().splitlines()
    got = json.loads(line)
    assert (got["type"], got["key"]) == ("dead_letters", None)
    assert got["told"]["data"]["notices"][0]["text"].endswith("it said [secret] and $(reboot)")


@pytest.mark.slow
async def test_a_command_that_fails_is_run_again(
    store: Store, tmp_path: Path, command: Callable[[str], list[str]]
) -> None:
    config = configured(tmp_path, {"command": command("3"), "on": EVERY, "timeout_seconds": SECONDS})
    target = await begun(store, config)
    await store.write(letter, "t-1")
    for _ in range(2):
        with pytest.raises(NotifyError, match="it ended with exit code 3"):
            await target.deliver()
    assert len((tmp_path / "out").read_text().splitlines()) == 2
    missing = await begun(store, configured(tmp_path, {"command": "/not/there", "on": EVERY}))
    await store.write(letter, "t-2")
    with pytest.raises(NotifyError, match="notify /not/there: /not/there is not an executable"):
        await missing.deliver()


@pytest.mark.slow
async def test_a_command_that_hangs_is_killed_with_its_children(
    store: Store, tmp_path: Path, command: Callable[[str], list[str]]
) -> None:
    config = configured(tmp_path, {"command": command("hang"), "on": EVERY, "timeout_seconds": 5})
    target = await begun(store, config)
    await store.write(letter, "t-1")
    with pytest.raises(NotifyError, match="it did not end within 5 s and was killed"):
        await target.deliver()
    child = int((tmp_path / "out.child").read_text())
    status = Path(f"/proc/{child}/status")
    await until(lambda: not status.exists() or "Z (zombie)" in status.read_text(), "the end of its child")


async def test_a_daemon_works_and_stops_while_a_target_hangs(
    tmp_path: Path, webhook: Webhook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.daemon.service.NOTICE_SECONDS", 0.1)
    caplog.set_level(logging.INFO, "flywheel")
    for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"):
        monkeypatch.setenv(name, "a-key-of-langfuse")
    (tmp_path / "lines.jsonl").write_text("no JSON\n")
    with JudgeServer() as judge, Webhook() as other, Webhook() as langfuse:
        webhook.go_on.clear()
        langfuse.go_on.clear()
        config = configured(
            tmp_path,
            {"url": webhook.url, "on": ["dead_letters"], "timeout_seconds": 600},
            {"url": other.url, "on": ["dead_letters", "source_error"]},
            sources=[{"type": "jsonl", "path": "lines.jsonl"}, {"path": "missing.sqlite"}],
            judge={"base_url": judge.base_url, "model": "j"},
            export={"langfuse": {"host": langfuse.base_url, "timeout_seconds": 600}},
        )
        async with asyncio.timeout(2 * SECONDS), running_daemon(config):  # and not 600
            await until(lambda: webhook.got, "the request that hangs")
            await until(lambda: len(other.subjects()) == 2, "the notices of the other target")
            assert {told["type"] for told in other.told} == {"dead_letters", "source_error"}
            for number in (1, 2):
                metadata = {"trace_id": f"{number:032x}", "span_id": f"{number:016x}"}
                with (tmp_path / "lines.jsonl").open("a") as file:
                    file.write(
                        json.dumps({"question": f"{number}+1?", "answer": "\\boxed{2}", "metadata": metadata}) + "\n"
                    )
                await until(lambda number=number: judge.calls >= number, "a verdict while the targets hang")
                await until(lambda: langfuse.got, "the score that hangs")
    # What was not confirmed is sent by the next daemon.
    webhook.go_on.set()
    async with open_state(config.state_dir) as store:
        await (await begun(store, config)).deliver()
    assert len(webhook.got) == 2
    assert webhook.told[0]["data"] == webhook.told[1]["data"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "budget", "kind"), [("401", None, "judge_failing"), ("good", 1, "budget_spent")]
)
def test_run_once_tells_what_happened(
    flywheel: Run, tmp_path: Path, webhook: Webhook, behaviour: str, budget: int | None, kind: str
) -> None:
    line = '{{"question": "{n}+1?", "answer": "\\\\boxed{{{n}}}"}}\n'
    (tmp_path / "lines.jsonl").write_text("".join(line.format(n=n) for n in range(4)))
    with JudgeServer(behaviour=behaviour) as judge:
        (tmp_path / "flywheel.yaml").write_text(
            f"""
sources: [{{type: jsonl, path: lines.jsonl}}]
judge: {{base_url: "{judge.base_url}", model: j, max_thread: 1, budget: {{tokens_per_run: {budget or "null"}}}}}
serving: {{urls: ["http://127.0.0.1:9"]}}
notify:
  - url: {webhook.url}
    on: [judge_failing, budget_spent]
"""
        )
        flywheel("run", "--once")
        flywheel("run", "--once")
    assert [told["type"] for told in webhook.told] == [kind]


def test_the_settings_are_checked(tmp_path: Path) -> None:
    for entry, why in (
        ({"on": ["promoted"]}, "it needs one of url, url_env and command"),
        ({"url": "http://a/", "command": "b", "on": ["promoted"]}, "it needs one of"),
        ({"url": "http://a/", "on": []}, "1 or more items"),
        ({"url": "http://a/"}, r"notify\.0\.on`: it is required"),
        ({"url": "http://a/", "on": ["promotet"]}, r"notify\.0\.on\.0"),
        ({"url": "ftp://s3cret/", "on": ["promoted"]}, "it must begin with http"),
        ({"command": "b", "secret_env": "X", "on": ["promoted"]}, "secret_env signs"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            configured(tmp_path, entry)
        assert "s3cret" not in str(caught.value)
    twice = {"url": "http://a/", "on": ["promoted"]}, {"url": "http://a/", "on": ["rejected"]}
    with pytest.raises(ConfigError, match="two entries have the same url"):
        configured(tmp_path, *twice)
    named = {"name": "a", **twice[0]}, {"name": "a", "command": "b", "on": ["rejected"]}
    with pytest.raises(ConfigError, match="two entries have the same name"):
        configured(tmp_path, *named)


def test_yaml_takes_the_key_on_for_true(tmp_path: Path, flywheel: Run) -> None:
    file = tmp_path / "flywheel.yaml"
    file.write_text(
        "notify:\n  - command: page 'the team'\n    on: [promoted]\n  - {url: 'http://h/s3cret', on: [rejected]}\n"
    )
    first, second = load(file).notify
    assert (first.command, first.on) == (["page", "the team"], [NoticeType.PROMOTED])
    assert second.on == [NoticeType.REJECTED]
    ran = flywheel("config", "show", "--json")
    found = {each["key"]: (each["value"], each["origin"]) for each in ran.json["settings"]}
    assert found["notify.0.on"] == (["promoted"], "given")
    assert found["notify.1.url"][0] == "http://h/[secret]"
    assert "s3cret" not in ran.out


def test_the_page_names_every_notice() -> None:
    page = (ROOT / "docs" / "operate" / "monitor.md").read_text().split("## Notices")[1].split("\n## ")[0]
    assert set(EVERY) <= set(re.findall(r"`(\w+)`", page.split("| notice |")[1]))


async def test_a_password_in_the_url_is_sent_and_in_no_error(
    store: Store, tmp_path: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_USERS, "")
    url = webhook.url.replace("://", "://bob:s3cret-word@")
    target = await begun(store, configured(tmp_path, {"url": url, "on": EVERY}))
    await store.write(letter, "a-task")
    await target.deliver()
    [(headers, _)] = webhook.got
    assert headers["authorization"] == f"Basic {base64.b64encode(b'bob:s3cret-word').decode()}"
    webhook.statuses.append(500)
    await store.write(letter, "another")
    with pytest.raises(NotifyError) as failed:
        await target.deliver()
    assert "s3cret" not in str(failed.value)
