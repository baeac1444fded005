"""What a limit on the length of attributes has cut is found by the texts alone, and nothing else is."""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply, SpanStatus
from flywheel.sources.spans.attributes import attributes_of
from flywheel.sources.spans.span import Span, SpanKind
from flywheel.sources.spans.truncation import breaks_off, longest_of, marked
from flywheel.sources.studio.reader import StudioReader
from tests.cases import for_each
from tests.sources.studio.reading import QUICK, Ledger, extracted, read_all
from tests.sources.studio.writer import (
    DATA,
    NAMES,
    Studio,
    agent,
    chat,
    empty_like,
    insert,
    message,
    part,
    rows,
    tool,
)

ANY_TEXT = st.text(st.characters())
"""With lone surrogates."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)
WHOLE = st.lists(JSON) | st.dictionaries(ANY_TEXT, JSON) | ANY_TEXT
SENTENCE = "The plan A is cheaper than plan B in the first year and it also "


@given(value=WHOLE, data=st.data(), ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_json_breaks_off_wherever_it_is_cut_and_never_where_it_is_whole(
    value: Any, data: st.DataObject, ascii_only: bool, indent: int | None
) -> None:
    """Also with NaN and lone surrogates, which Python's `json` writes."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert not breaks_off(text)
    assert breaks_off(text[: data.draw(st.integers(1, len(text) - 1))])


@given(value=WHOLE, text=ANY_TEXT)
def test_a_text_that_begins_like_json_stays_a_text(value: Any, text: str) -> None:
    assert not breaks_off(f"{json.dumps(value)} is {text}")
    assert not breaks_off(f"[{{{text.lstrip()}]" if text.strip()[:1] not in ('"', "}", "") else "[{x")


@pytest.mark.parametrize("text", ["", "What?", "[{", "[x", '[{"a": 1} 2', "[1.2.3", '{"a" "b', "[" * 100_000, "[tx"])
def test_what_does_not_break_off(text: str) -> None:
    assert breaks_off(text) == (text == "[{")


def is_evidence(text: str) -> bool:
    """By the words of the documentation."""
    return (
        not unicodedata.category(text[-1]).startswith("P")
        and text[-1] not in "<>`´＜＞"
        and not re.fullmatch(r"[0-9A-Za-z+/=_-]+", text)
    )


def limit_by_definition(texts: Sequence[str], jsons: Sequence[str]) -> int:
    longest = max(map(len, (*texts, *jsons)), default=0)
    alike = {text[-32:] for text in texts if len(text) == longest and longest >= 64 and is_evidence(text)}
    return longest if len(alike) > 1 else 0


TEXTS = st.builds(
    lambda words, last, length: (words * 70)[: length - len(last)] + last,
    st.sampled_from(["abc ", "more words ", "c0ffee", 'a "quoted" \\ \n', "字 和 ", "é "]),
    st.sampled_from(["a", "b c", "d e", "字", " ", "\n", ".", "。", ")", '"', "`"]),
    st.sampled_from([5, 64, 120, 120, 120]),
)
ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "gen_ai.agent.description": TEXTS,
        "gen_ai.output.messages": TEXTS,
        "output": TEXTS,
        "app.notes.last": TEXTS,
        "app.tags": st.lists(TEXTS, max_size=3),
        "gen_ai.input.messages": st.lists(TEXTS, min_size=1, max_size=2)
        | st.lists(TEXTS.map(lambda text: {"role": "user", "content": text[:80]}), min_size=1, max_size=2),
        "app.plan": TEXTS.map(lambda text: [{"step": text[:90]}]),
    },
)
SPANS = st.lists(
    st.tuples(ATTRIBUTES, ATTRIBUTES, st.sampled_from(["a", "b"]), st.booleans()), min_size=1, max_size=4
)
"""Of each span its attributes, those of an event, its resource, and whether a receiver has measured it."""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = made
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return made


def texts_and_jsons(values: Sequence[Any]) -> tuple[list[str], list[str]]:
    """The texts in the values of attributes, and what else is JSON text."""
    arrays = [value for value in values if isinstance(value, list)]
    jsons = [array for array in arrays if not all(isinstance(item, str) for item in array)]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if isinstance(text, str)], [compact(array) for array in jsons]


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def span_with(
    number: int, attributes: Mapping[str, Any], event: Mapping[str, Any], resource: str, is_measured: bool
) -> Span:
    made = nested(attributes)
    if is_measured:
        texts, jsons = texts_and_jsons([*attributes.values()])
        made["flywheel"] = {"longest": to_builtins(longest_of([*texts, *jsons]))}
    data = compact(made).encode()
    return Span(
        rowid=number,
        span_id=str(number),
        trace_id="t",
        parent_id="",
        name="",
        kind=SpanKind.LLM,
        started_ns=number,
        ended_ns=number + 1,
        status=SpanStatus.OK,
        status_message="",
        conversation_id="",
        attributes=attributes_of(data),
        events=({"name": "e", "attributes": nested(event)},) if event else (),
        resource=resource,
        recorded=data,
    )


@settings(max_examples=500)
@given(shape=SPANS)
def test_a_limit_is_what_the_definition_says_of_the_values_of_a_resource(
    shape: list[tuple[dict[str, Any], dict[str, Any], str, bool]],
) -> None:
    """However they are divided among spans and events, nested and written. No text is longer than the limit."""
    spans = [span_with(number, *each) for number, each in enumerate(shape)]
    found = marked({span.span_id: span for span in spans})
    for resource in ("a", "b"):
        own = [each for *both, name, _ in shape if name == resource for each in both]
        texts, jsons = texts_and_jsons([value for each in own for value in each.values()])
        limit = limit_by_definition(texts, jsons)
        assert {span.limit for span in found.values() if span.resource == resource} <= {limit}
        assert not limit or max(map(len, (*texts, *jsons))) == limit


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (SENTENCE, True),
        (SENTENCE[:-1] + "\n", True),
        ("这 是 一 个 很 长 的 问 题 " * 5, True),
        (SENTENCE + "costs less.", False),
        (SENTENCE + "”", False),
        (SENTENCE + "」", False),
        (SENTENCE + "؟", False),
        (SENTENCE + "<end>", False),
        (SENTENCE + "`code`", False),
        ("0123456789abcdef" * 5, False),
        ("iVBORw0KGgo+/AAAANSUhEUg==" * 4, False),
        ("data:image/png;base64," + "iVBORw0KGgo" * 8, False),
        (SENTENCE[:63], False),
    ],
)
def test_which_texts_are_evidence(text: str, counts: bool) -> None:
    assert bool(longest_of([text]).endings) == counts


def test_texts_that_end_alike_are_one_text() -> None:
    other = SENTENCE.upper()[:32] + SENTENCE[32:]
    assert len(longest_of([SENTENCE, other]).endings) == 1
    assert len(longest_of([SENTENCE, SENTENCE[:32] + other[:32]]).endings) == 2


@pytest.mark.parametrize("key", ["gen_ai.input.messages", "app.plan"])
def test_lengths_are_counted_in_characters(key: str) -> None:
    """Chinese JSON of more bytes than a limit has characters does not exceed it."""
    texts = {"app.first": f"one {SENTENCE * 2}"[:128], "app.second": f"the second {SENTENCE * 2}"[:128]}
    for count, limit in ((90, 128), (120, 0)):
        attributes = {**texts, key: [{"text": "字" * count}]}
        (span,) = marked({"0": span_with(0, attributes, {}, "a", False)}).values()
        assert span.limit == limit


def test_texts_with_quotation_marks_show_a_limit() -> None:
    texts = {name: f'{name} says "{SENTENCE}" and "{SENTENCE}"'[:120] for name in ("one", "another")}
    (span,) = marked({"0": span_with(0, texts, {}, "a", False)}).values()
    assert span.limit == 120


def messages(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [message(role, part(text)) for role, text in said]


def cut(value: Any, length: int) -> str:
    text = json.dumps(value)
    assert len(text) > length
    return text[:length]


ASKED = "Please compare plan A and plan B for a family of four, by year"
ANSWER = "Plan A is cheaper in the first year, and plan B in all the years after it."
GIVEN = messages(("system", "You compare plans."), ("user", ASKED))
SAID = messages(("assistant", ANSWER))


def recorded(row: dict[str, Any], asked: Any, said: Any) -> dict[str, Any]:
    """A row with these values as its messages, whatever they are."""
    attributes = json.loads(row["attributes"])
    attributes["gen_ai"] |= {"input": {"messages": asked}, "output": {"messages": said}}
    return {**row, "attributes": json.dumps(attributes)}


def call(asked: Any, said: Any, **more: Any) -> dict[str, Any]:
    return recorded(chat(more.pop("name", "m"), [], parent="a", **more), asked, said)


def of(path: Path, *spans: dict[str, Any]) -> Reply:
    path.mkdir(exist_ok=True)
    return extracted(path, *spans)["a"]


@pytest.mark.parametrize("length", [30, 82, 128])
def test_no_fragment_of_json_becomes_a_question_or_an_answer(tmp_path: Path, length: int) -> None:
    """At whatever length, also below that of the shortest limit that lengths show."""
    model = chat("m", GIVEN, SAID, parent="a", began=0.1, ended=0.9)
    asked = messages(("user", ASKED))
    for place, (before, after, what) in enumerate(
        [
            (cut(asked, length), SAID, "the question was cut (gen_ai.input.messages)"),
            (asked, cut(SAID, length), "the answer was cut (gen_ai.output.messages)"),
        ]
    ):
        reply = of(tmp_path / f"{place}", recorded(agent("a"), before, after), model)
        assert reply.skip is SkipReason.TRUNCATED
        assert reply.skip_detail.startswith(what)
        assert "[{" not in reply.query + reply.answer


def test_an_agent_without_messages_has_those_of_its_model_calls_also_if_they_are_cut(tmp_path: Path) -> None:
    bare = agent("a", None, None)
    asked = of(tmp_path / "1", bare, call(cut(GIVEN, 100), SAID, ended=0.5))
    answered = of(tmp_path / "2", bare, call(GIVEN, cut(SAID, 100), ended=0.5))
    assert [(reply.skip, reply.skip_detail.split(":")[0]) for reply in (asked, answered)] == [
        (SkipReason.TRUNCATED, "the question was cut (gen_ai.input.messages)"),
        (SkipReason.TRUNCATED, "the answer was cut (gen_ai.output.messages)"),
    ]
    later = call(GIVEN, SAID, name="n", began=0.6, ended=0.9)
    reply = of(tmp_path / "3", bare, call(cut(GIVEN, 100), SAID, ended=0.5), later)
    assert reply.skip is SkipReason.TRUNCATED


def test_an_agent_whose_own_answer_was_cut_has_not_that_of_its_model_call(tmp_path: Path) -> None:
    reply = of(tmp_path, recorded(agent("a"), None, cut(SAID, 100)), call(GIVEN, SAID))
    assert (reply.skip, reply.skip_detail[:18]) == (SkipReason.TRUNCATED, "the answer was cut")


def test_what_is_cut_elsewhere_makes_the_prompt_inexact(tmp_path: Path) -> None:
    whole = agent("a", ASKED, ANSWER)
    for place, (spans, why) in enumerate(
        [
            ([call(cut(GIVEN, 100), SAID)], "the attribute gen_ai.input.messages of chat was cut"),
            ([call(GIVEN, cut(SAID, 100))], "the attribute gen_ai.output.messages of chat was cut"),
            (
                [chat("m", GIVEN, SAID, parent="a", ended=0.9), tool_with('{"city": "Lim')],
                "the attribute gen_ai.tool.call.arguments of execute_tool was cut",
            ),
        ]
    ):
        reply = of(tmp_path / f"{place}", whole, *spans)
        assert (reply.skip, reply.query, reply.answer) == (None, ASKED, ANSWER)
        assert why in reply.prompt_reason


def tool_with(arguments: str) -> dict[str, Any]:
    made = tool("t", "c", "weather", "rain", parent="a", began=0.2, ended=0.3)
    attributes = json.loads(made["attributes"])
    attributes["gen_ai"]["tool"]["call"]["arguments"] = arguments
    return {**made, "attributes": json.dumps(attributes)}


TOOLS = [{"type": "function", "name": "weather", "description": "The weather of a city", "parameters": {}}]


@pytest.mark.parametrize("recorded", [cut(TOOLS, 60), [TOOLS[0], cut(TOOLS[0], 60)]], ids=["all", "one"])
def test_a_prompt_with_tools_that_were_cut_is_inexact(tmp_path: Path, recorded: Any) -> None:
    model = chat("m", GIVEN, SAID, parent="a")
    attributes = json.loads(model["attributes"])
    attributes["gen_ai"]["tool"] = {"definitions": recorded}
    reply = of(tmp_path, agent("a", ASKED, ANSWER), {**model, "attributes": json.dumps(attributes)})
    assert reply.skip is None
    assert reply.prompt_reason == "the attribute gen_ai.tool.definitions of chat was cut"
    assert len(reply.tools) == isinstance(recorded, list)


@for_each(
    "own",
    [
        "[{ is what my file begins with",
        '[{"sku": 77}, is this right?',
        '{"a": 1} {"b": 2}',
    ],
)
def test_a_users_own_text_stays_a_text(own: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As a message, and in place of the messages."""
    folder = tmp_path_factory.mktemp("own")
    model = chat("m", messages(("user", own)), "It is.", parent="a", ended=0.5)
    reply = of(folder / "1", agent("a", own, "It is."), model)
    assert (reply.query, reply.answer, reply.skip, reply.prompt_reason) == (own, "It is.", None, "")
    reply = of(folder / "2", recorded(agent("a"), own, "It is."), call(own, "It is.", ended=0.5))
    assert (reply.query, reply.answer, reply.skip) == (own, "It is.", None)


def test_a_users_own_broken_json_within_a_message_stays_a_text(tmp_path: Path) -> None:
    own = '[{"sku": 77, "name": "cha'
    reply = of(tmp_path, agent("a", own, own), chat("m", messages(("user", own)), own, parent="a"))
    assert (reply.query, reply.answer, reply.skip, reply.prompt_reason) == (own, own, None, "")


def test_messages_that_only_pythons_json_reads_are_read(tmp_path: Path) -> None:
    asked = '[{"role": "user", "content": "Is \\ud83d it?", "score": NaN, "least": -Infinity}]'
    reply = of(tmp_path, recorded(agent("a"), asked, SAID))
    assert (reply.skip, reply.answer) == (None, ANSWER)
    assert (reply.query[:3], reply.query[-4:]) == ("Is ", " it?")


LONG = {name: (f"{name} " * 40)[:150] for name in ("system", "question", "answer", "result")}


@pytest.mark.parametrize(
    ("long", "skip", "detail"),
    [
        (("system", "question"), SkipReason.TRUNCATED, "the question was cut (at 150 characters)"),
        (("system", "answer"), SkipReason.TRUNCATED, "the answer was cut (at 150 characters)"),
        (("system", "result"), None, ""),
        (("system",), None, ""),
    ],
)
def test_texts_of_one_length_that_none_exceeds(
    tmp_path: Path, long: tuple[str, ...], skip: SkipReason | None, detail: str
) -> None:
    """Each attribute is a text, as where messages are recorded as text."""
    text = {name: LONG[name] if name in long else f"a short {name}" for name in LONG}
    reply = of(
        tmp_path,
        recorded(agent("a"), text["question"], text["answer"]),
        call(text["system"], text["answer"], began=0.1),
        tool("t", "c", "f", text["result"], parent="a", began=0.2, ended=0.3),
    )
    assert (reply.skip, reply.skip_detail.split(":")[0]) == (skip, detail)
    assert ("at 150 characters" in reply.prompt_reason) == (len(long) > 1)


def test_a_longer_text_of_the_same_resource_shows_that_there_is_no_limit(tmp_path: Path) -> None:
    """One of another resource, which may have another limit, or none, shows nothing."""
    asked = recorded(agent("a"), LONG["question"], LONG["answer"])
    longer = call("w" + LONG["system"], "Yes.")
    assert of(tmp_path / "1", asked, longer).skip is None
    assert of(tmp_path / "2", asked, longer | {"resource": '{"attributes":{}}'}).skip is SkipReason.TRUNCATED


def test_a_span_that_arrives_later_shows_the_limit(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(recorded(agent("a"), LONG["question"], "Yes."))
    reader, ledger = StudioReader(studio.path, QUICK), Ledger()
    try:
        ledger.pass_(reader, final=True)
        assert ledger.replies["a"].skip is None
        studio.write(call(LONG["system"], "Yes."))
        ledger.pass_(reader, final=True)
        assert ledger.replies["a"].skip is SkipReason.TRUNCATED
    finally:
        reader.close()


JSON_OF_FUNCTIONS = {
    "input", "output", "metadata", "agentscope.function.input", "agentscope.function.output",
    "gen_ai.tool.call.arguments", "gen_ai.tool.call.result",
}  # fmt: skip


def limited(value: Any, length: int, path: str = "") -> Any:
    """The attributes that Studio had stored of what an SDK with that limit had sent."""
    if isinstance(value, dict) and path not in JSON_OF_FUNCTIONS:
        return {key: limited(inner, length, f"{path}.{key}".lstrip(".")) for key, inner in value.items()}
    if not isinstance(value, str | dict | list):
        return value
    is_json = not isinstance(value, str) or path in JSON_OF_FUNCTIONS
    text = json.dumps(value, ensure_ascii=False) if is_json else value
    if len(text) <= length:
        return value
    try:
        return json.loads(text[:length])
    except ValueError:
        return text[:length]


@pytest.mark.parametrize("name", NAMES)
def test_genuine_traces_are_accused_only_where_they_were_cut(tmp_path: Path, name: str) -> None:
    """No reply becomes a task with another question or answer than it had, none a task that says it is exact."""
    whole, dead, _ = read_all(DATA / f"{name}.sqlite")
    assert not [reply for reply in whole if reply.skip is SkipReason.TRUNCATED or "was cut" in reply.prompt_reason]
    said = {reply.span_id: (reply.query, reply.answer) for reply in whole}
    with sqlite3.connect(f"file:{DATA / name}.sqlite?mode=ro", uri=True) as source:
        columns = [column for _, column, *_ in source.execute("PRAGMA table_info(span_table)")]
    place = columns.index("attributes")
    for length in (128, 400):
        path = empty_like(name, tmp_path / f"{length}.sqlite")
        cuts = [
            (*row[:place], compact(limited(json.loads(row[place]), length)), *row[place + 1 :]) for row in rows(name)
        ]
        insert(path, cuts)
        replies, dead, _ = read_all(path)
        tasks = [reply for reply in replies if reply.skip is None]
        assert dead == []
        assert [said[reply.span_id] for reply in tasks] == [(reply.query, reply.answer) for reply in tasks]
        assert [reply for reply in tasks if "was cut" not in reply.prompt_reason] == []
        found = [reply for reply in replies if reply.skip is SkipReason.TRUNCATED]
        assert len(found) > (90 if length == 128 else 0)


@for_each(
    "result",
    ["\"ToolResponse(content=[{'type': 'text', 'text': 'Rain in", '{"content": [{"type": "text", "text": "Rain in'],
)
def test_a_tools_result_that_was_cut_makes_the_prompt_inexact(result: str, tmp_path_factory: Any) -> None:
    """That of another program may be any text, also one that breaks off."""
    used = tool("t", "c", "weather", result, parent="a", began=0.2, ended=0.3)
    folder = tmp_path_factory.mktemp("result")
    reply = of(folder / "1", agent("a", ASKED, ANSWER), call(GIVEN, SAID), used)
    assert reply.prompt_reason == "the attribute gen_ai.tool.call.result of execute_tool was cut"
    other = tool("t", "c", "head", '{"rows": [1, 2', parent="a", began=0.2, ended=0.3)
    assert of(folder / "2", agent("a", ASKED, ANSWER), call(GIVEN, SAID), other).prompt_reason == ""


def test_lone_surrogates_nan_and_large_numbers_hide_no_limit(tmp_path: Path) -> None:
    odd = recorded(agent("a"), LONG["question"], LONG["answer"])
    attributes = odd["attributes"][:-1] + ', "score": NaN, "half": "\\ud83d"}'
    event = {"name": "e", "attributes": {"half": "\ud83d", "large": 2**70}}
    reply = of(tmp_path / "1", {**odd, "attributes": attributes, "events": json.dumps([event])})
    assert reply.skip is SkipReason.TRUNCATED
