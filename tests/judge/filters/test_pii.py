"""Personal data: found where it is, not found where it is not, and gone from every place of a task line."""

from __future__ import annotations

import builtins
import copy
import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.file import Config, parse
from flywheel.errors import ConfigError
from flywheel.judge.filters.chain import load_chain, redactor_of
from flywheel.judge.filters.deduplication import particulars, template
from flywheel.judge.filters.pii import Pii, find
from flywheel.records.task import qa_hash, task_line
from tests.factories.trace import reply

LABELS = sorted((Path(__file__).parents[2] / "data" / "studio").glob("*.labels.jsonl"))
NOT_LOOKED_FOR = {"Alice Example", "203.0.113.42"}
"""Names and addresses of machines: only Presidio knows them."""

PERSONAL = [
    ("mail alice.b+c@mail.example.co.uk, please", "email", "alice.b+c@mail.example.co.uk"),
    ("an jürgen@münchen.de!", "email", "jürgen@münchen.de"),
    ("邮箱bob@example.com谢谢", "email", "bob@example.com"),
    ("Reach me at <bob@example.com>.", "email", "bob@example.com"),
    ("call +1-555-010-0199 now", "phone", "+1-555-010-0199"),
    ("ring +44 20 7946 0958", "phone", "+44 20 7946 0958"),
    ("ring 0049 30 901820", "phone", "0049 30 901820"),
    ("(415) 555-2671 it is", "phone", "(415) 555-2671"),
    ("my number is 415-555-2671", "phone", "415-555-2671"),
    ("call (415)555-2671", "phone", "(415)555-2671"),
    ("It is 1-415-555-2671 today", "phone", "1-415-555-2671"),
    ("so erreicht man 089 / 1234567", "phone", "089 / 1234567"),
    ("c'est le 06 12 34 56 78", "phone", "06 12 34 56 78"),
    ("0171 123 4567 after six", "phone", "0171 123 4567"),
    ("我的手机是13800138000。", "phone", "13800138000"),
    ("phone 13800138000.", "phone", "13800138000"),
    ("Telefon: 030 901820", "phone", "030 901820"),
    ("My card is 4111 1111 1111 1111 and", "card", "4111 1111 1111 1111"),
    ("4111-1111-1111-1111", "card", "4111-1111-1111-1111"),
    ("amex 378282246310005", "card", "378282246310005"),
    ("IBAN DE89 3704 0044 0532 0130 00 is mine", "iban", "DE89 3704 0044 0532 0130 00"),
    ("GB82WEST12345698765432.", "iban", "GB82WEST12345698765432"),
    (
        "key sk-FAKEpublic0000000000000000000000000000000001.",
        "api-key",
        "sk-FAKEpublic0000000000000000000000000000000001",
    ),
    ("AKIAIOSFODNN7EXAMPLE", "api-key", "AKIAIOSFODNN7EXAMPLE"),
    ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "api-key", "ghp_16C7e42F292c6912E7710c838347Ae178B4a"),
    ("api_key = 'a8f5f167f44f4964e6c998dee827110c'", "api-key", "a8f5f167f44f4964e6c998dee827110c"),
    ("password: Xk29vLq0Zt7mPw4RbN1e", "api-key", "Xk29vLq0Zt7mPw4RbN1e"),
    ("my key is sk-abc123, ok?", "api-key", "sk-abc123"),
    ("sk-abcdefghijklmnopqrstuvwxyz", "api-key", "sk-abcdefghijklmnopqrstuvwxyz"),
    ("sk-proj-aB3dE5gH7", "api-key", "sk-proj-aB3dE5gH7"),
    ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "api-key", "dXNlcjpwYXNzd29yZA=="),
    ("{'authorization': 'basic YWxpY2U6w7xiZXI_'}", "api-key", "YWxpY2U6w7xiZXI_"),
    ("postgres://bob:pw@host", "api-key", "bob:pw"),
    ("mongodb+srv://u:p%40ss@c.example.net/x?y=z@w", "api-key", "u:p%40ss"),
    ('{"url": "redis://:pw@host:6379", "to": 1}', "api-key", ":pw"),
    ("https://bob:pw@example.com/x", "api-key", "bob:pw"),
    ("Order 4111 1111 1111 1111", "card", "4111 1111 1111 1111"),
    ("order number: 4111-1111-1111-1111", "card", "4111-1111-1111-1111"),
    ("SSN 123-45-6789", "ssn", "123-45-6789"),
    ("It is 123-45-6789.", "ssn", "123-45-6789"),
    ("my social security number is 123 45 6789", "ssn", "123 45 6789"),
    ("Telefon: 123 45 6789", "phone", "123 45 6789"),
    (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKC\n-----END RSA PRIVATE KEY----- and",
        "private-key",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKC\n-----END RSA PRIVATE KEY-----",
    ),
    ("-----BEGIN PRIVATE KEY-----\ncut off", "private-key", "-----BEGIN PRIVATE KEY-----\ncut off"),
]
HARMLESS = [
    "Order 13912345678 was shipped; order number: 20240501123",
    "订单13912345678已发货",
    "Card-like but wrong: 4111 1111 1111 1112",
    "ISBN 978-3-16-148410-0 and ISBN 9783161484100, EAN 4006381333931",
    "1700000000 and 1700000000000 ms",
    "2024-05-01 12:30:45, 01.05.2024, 2024/05/01, 20240501123045",
    "192.168.1.100 and 203.0.113.42:8080, fe80::1",
    "md5 d41d8cd98f00b204e9800998ecf8427e, commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
    "550e8400-e29b-41d4-a716-446655440000",
    "123456789 + 987654321 = 1111111110, 2^31 = 2147483648, 13800138000 / 2, 2 * 13800138000",
    "Rows 612 34567, 415 5552 671, 303 471 22 18 and 9876 543 210 of 171 123 4567 890 12 34",
    "3.14159265358979323846, 0.1234567890123, 6.02214076e23, 299792458 m/s, 12,345,678,901",
    "1 2 3 4 5 6 7 8 9 10; (1, 2, 3, 4, 5, 6, 7); 100 200 300 400; 4 8 15 16 23 42",
    "x = 1234567890123456; y = [4111111111111112]",
    "@property\ndef f(self): return a @ b\n@app.route('/x')",
    "git@ssh host:/path, f(x)@g, user@localhost",
    "from 1914-1918 to 1939-1945, 2020-2021 2021-2022",
    "v1.2.3-20240101, arXiv 2402.03300, RFC 2119, 1-800",
    "pip install sk-learn-contrib-imbalanced-learn-package",
    "Order 4111111111111111 was shipped",
    "sk-learn-contrib-2024, sk-circle12, sk-cube9, sk-fading-circle, sk-SK, sk-12345678",
    "Basic knowledge, basic concepts, basic authentication, BASIC programming, Basic auth: none",
    "ssh://git@host:22/x, http://localhost:8000/@user, https://x.example:8080/a@b, http://host:80 a@b",
    "postgres://${USER}:${PASSWORD}@host, postgres://<user>:<password>@host, http://{user}:{pw}@host",
    "part 123 45 6789, 000-12-3456, 078-05-1120, 900-12-3456, 666-12-3456",
    "the password must be at least twelve characters long",
    "The bearer authentication_mechanism_of_http",
    "Solve \\frac{123456}{7891011} and \\boxed{1378}",
    "for (int i = 0; i < 1000000000; i++) sum += 0x7ffee4b2c9a0;",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "GB82WEST12345698765431 has wrong check digits, and AB12CDEFGHIJKLMNOP is none",
]


def regions() -> tuple[str, ...]:
    return Pii().regions


def line(**values: Any) -> dict[str, Any]:
    return task_line(reply(1, **values), "/x", "t-1")


@pytest.mark.parametrize(("text", "kind", "piece"), PERSONAL)
def test_personal_data_is_found_as_a_whole(text: str, kind: str, piece: str) -> None:
    assert [(found.kind, text[found.start : found.end]) for found in find(text, regions=regions())] == [(kind, piece)]


@pytest.mark.parametrize("text", HARMLESS)
def test_no_false_alarm(text: str) -> None:
    assert [text[found.start : found.end] for found in find(text, regions=regions())] == []


def test_the_labelled_strings_and_no_others_are_found_in_genuine_replies() -> None:
    labelled = found_in = 0
    for path in LABELS:
        for row in map(json.loads, path.read_text().splitlines()):
            text = f"{row['query']}\n{row['answer']}"
            found = {text[each.start : each.end] for each in find(text, regions=regions())}
            wanted = {piece for piece in row.get("pii", []) if piece in text} - NOT_LOOKED_FOR
            assert found == wanted, row["span_id"]
            labelled += len(wanted)
            found_in += 1
    assert labelled >= 30
    assert found_in >= 300


def test_only_the_kinds_that_are_asked_for() -> None:
    text = "bob@example.com, +44 20 7946 0958"
    assert [found.kind for found in find(text, ["email"])] == ["email"]
    allowing = Pii(allow=("BOB@example.com",)).find(text)
    assert [found.kind for found in allowing] == ["phone"]


@pytest.mark.parametrize("text", ["+44 20 7946 0958", "(+49) 30 901820", "0049 30 901820"])
def test_a_number_with_a_country_code_needs_no_region(text: str) -> None:
    assert [found.kind for found in find(f"It is {text}.")] == ["phone"]


@pytest.mark.parametrize("separator", [" ", "\n"])
def test_numbers_in_a_row_are_no_phones_but_one_beside_a_word_is(separator: str) -> None:
    draw = random.Random(1)
    text = separator.join(str(draw.randrange(10 ** draw.randint(1, 12))) for _ in range(4_000))
    assert find(text, regions=["DE", "CN"]) == []
    (found,) = find(f"{text} tel {(number := '030 901820')}.", regions=["DE"])
    assert (found.kind, found.end - found.start) == ("phone", len(number))


def test_every_place_of_a_line_is_redacted_and_the_same_piece_alike() -> None:
    mail, card = "bob@example.com", "4111 1111 1111 1111"
    arguments = json.dumps({"to": mail, "phone": 13800138000})
    task = line(
        query=f"I am {mail}. Pay with {card}.",
        answer="Dear Bob@Example.com, alice@example.com: 4111-1111-1111-1111 is charged.",
        history=({"role": "system", "content": "Answer."}, {"role": "user", "content": f"Hi, {mail}"}),
        trajectory=({"role": "assistant", "tool_calls": [{"function": {"name": "send", "arguments": arguments}}]},),
        structured={"contact": mail, "phone": 13800138000, "count": 20123456789, mail: True},
        images=("data:image/png;base64,13800138000aaaaaaaaaaaa", f"https://x.example/?u={mail}"),
        reasoning=f"They are {mail}.",
    )
    before = copy.deepcopy(task)
    redacted = Pii().redactor()(task)
    assert task == before
    whole = json.dumps(redacted)
    for piece in (mail, "Bob@Example.com", "alice@example.com", "4111", "13800138000,"):
        assert piece not in whole.replace("base64,13800138000", "")
    assert redacted["main_query"] == "I am [EMAIL_1]. Pay with [CARD_1]."
    assert redacted["answer"] == "Dear [EMAIL_1], [EMAIL_2]: [CARD_1] is charged."
    assert redacted["prompt"][1]["content"] == "Hi, [EMAIL_1]"
    assert json.loads(redacted["metadata"]["structured_json"])["count"] == 20123456789
    assert redacted["metadata"]["answer"] == redacted["answer"]
    assert redacted["metadata"]["qa_hash"] == qa_hash(redacted["main_query"], redacted["answer"])
    assert redacted["metadata"]["conversation_id"] == task["metadata"]["conversation_id"]
    assert list(redacted) == list(task)
    assert list(redacted["metadata"]) == list(task["metadata"])


def test_a_redacted_line_stays_as_it_is_and_new_pieces_are_counted_on() -> None:
    redact = Pii().redactor()
    once = redact(line(query="I am a@example.com"))
    assert redact(once) is once
    more = redact({**once, "answer": "Not b@example.com?"})
    assert more["answer"] == "Not [EMAIL_2]?"


def test_a_line_without_personal_data_is_the_same_object() -> None:
    task = line()
    assert Pii().redactor()(task) is task


def test_reject_names_what_is_there_and_still_does_after_it_was_redacted() -> None:
    strict = Pii(action="reject", kinds=("email", "card"))
    task = line(query="Bill bob@example.com, +44 20 7946 0958")
    assert strict.keep(task) == (False, "it holds an e-mail address")
    assert strict.keep(strict.redactor()(task)) == (False, "it holds an e-mail address")
    assert strict.keep(line(query="ring +44 20 7946 0958"))[0]
    # What another filter of the chain redacted is none of this one's kinds.
    assert strict.keep(Pii(kinds=("phone",)).redactor()(line(query="ring +44 20 7946 0958")))[0]
    assert Pii().keep(task) == (True, "")


def test_a_chain_gives_its_redactors_to_whoever_stores_tasks(tmp_path: Path) -> None:
    chain = tmp_path / "c.yaml"
    chain.write_text(
        "id: c\nfilters:\n  - {type: pii, params: {kinds: [email]}}\n"
        "  - {type: pii, params: {kinds: [card], action: reject}}\n"
    )
    config = parse({"filter": {"chain": "c.yaml"}}, "test", tmp_path)
    redact = redactor_of(config)
    assert redact is not None
    assert redact(line(query="a@example.com 4111 1111 1111 1111 +44 20 7946 0958"))["main_query"] == (
        "[EMAIL_1] [CARD_1] +44 20 7946 0958"
    )
    chain.write_text("id: c\nfilters: [{type: pii, enabled: false}]")
    assert redactor_of(config) is None
    assert redactor_of(Config()) is None


def test_presidio_that_is_not_installed_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "c.yaml").write_text("id: c\nfilters: [{type: pii, params: {engine: presidio}}]")
    with pytest.raises(ConfigError, match=r"pip install .*\[pii\]"):
        load_chain(tmp_path / "c.yaml")


def test_without_presidio_nothing_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def guarded(name: str, *rest: Any, **more: Any) -> Any:
        assert not name.startswith("presidio")
        return genuine(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert Pii().find("a@example.com")


def test_what_presidio_finds_is_redacted_beside_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its interface, in a package of the same name: the real one needs a language model of hundreds of megabytes.
    (tmp_path / "presidio_analyzer.py").write_text(
        "import types\n"
        "class AnalyzerEngine:\n"
        "    def analyze(self, text, language, entities):\n"
        "        assert language == 'en' and entities == ['PERSON']\n"
        "        at = text.find('Alice Example')\n"
        "        found = types.SimpleNamespace(entity_type='PERSON', start=at, end=at + 13, score=0.9)\n"
        "        return [found] if at >= 0 else []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "presidio_analyzer", raising=False)
    pii = Pii(engine="presidio", entities=("PERSON",))
    pii.check_engine()
    redacted = pii.redactor()(line(query="Alice Example, a@example.com"))
    assert redacted["main_query"] == "[PERSON_1], [EMAIL_1]"
    monkeypatch.delitem(sys.modules, "presidio_analyzer", raising=False)


@pytest.mark.slow
@given(st.text(max_size=300) | st.text("0123456789 -+()./@abE", max_size=300))
def test_any_text_is_searched_and_what_is_found_is_in_order(text: str) -> None:
    found = find(text, regions=regions())
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert all(0 <= each.start < each.end <= len(text) for each in found)


@pytest.mark.parametrize(
    "text",
    [
        "“" * 50_000,
        "x@" * 25_000,
        "api_key " + " " * 50_000,
        "a" * 50_000,
        "1-" * 25_000,
        "basic " * 10_000,
        "://" * 20_000,
        "://a:" * 15_000,
        "sk-" * 20_000,
        "123-45-" * 10_000,
        "1 (1" * 15_000,
        "4111 1111 1111 1111 " * 4_000,
    ],
)
def test_texts_made_to_be_slow_are_not(text: str) -> None:
    # A search that is quadratic in these takes minutes, and the test's time limit ends it.
    template(text)
    particulars(text)
    find(text, regions=regions())
