"""From a reply to the ledger's entry: whatever is made faster, what is stored stays the same byte for byte."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import orjson
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records import similarity
from flywheel.records.exclusion import NOT_RECORDED
from flywheel.records.states import SkipReason
from flywheel.records.task import Entry, class_of, entry_of, exclusion_of_tools
from flywheel.records.trace import Reply
from tests.cases import for_each
from tests.factories.trace import START, reply

# The formula, written as plainly as it can be. What is stored was made by it.

_MARKS = re.compile(
    r"(?P<number>(?<=\d)[.,:](?=\d))"
    r"|(?<=\d) *[-*/%^]|[-*/%^](?= *\d)|(?<=\b\w) *[-*/%^](?= *\w\b)|(?<=\w)#"
    r"|(?P<other>[-*/%^#.,:])"
)
_NUMBERS = re.compile(r"\d+(?:[.,:]\d+)*|(?<!\S)[-*/%^+<>=#](?!\S)")
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_RUNS = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")


def folded(char: str) -> str:
    if char in "×÷\N{MINUS SIGN}":
        return {"×": "*", "÷": "/", "\N{MINUS SIGN}": "-"}[char]
    category = unicodedata.category(char)
    if category == "Pd":
        return "-"
    if char in "-*/%^#.,:" or category[0] in "LN":
        return char
    if category[0] == "M":
        return "" if "\ufe00" <= char <= "\ufe0f" else char
    if category == "Cf":
        return ""
    return f" {char} " if category in ("Sm", "Sc", "So") else " "


def mark(found: re.Match[str]) -> str:
    return found["number"] or (" " if found["other"] else f" {found[0].strip()} ")


def plain_normalised(text: str) -> str:
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    one = " ".join("".join(folded(char) for char in plain).split())
    return " ".join(_MARKS.sub(mark, one).split()) or " ".join(plain.split())


def plain_words(text: str) -> frozenset[int]:
    found: set[str] = set()
    for word in plain_normalised(text).split():
        for run in _RUNS.findall(word):
            if len(run) > 1 and re.match(f"[{_UNSPACED}]", run):
                found.update(run[start : start + 2] for start in range(len(run) - 1))
            else:
                found.add(run)
    return frozenset(xxhash.xxh32_intdigest(word.encode("utf-8", "surrogatepass")) for word in found)


def plain_bands(words: tuple[int, ...]) -> list[int]:
    if not words:
        return []
    factors = [xxhash.xxh32_intdigest(b"factor", seed=k) | 1 for k in range(40)]
    offsets = [xxhash.xxh32_intdigest(b"offset", seed=k) for k in range(40)]
    least = [
        min((factor * word + offset) % 2**32 for word in words)
        for factor, offset in zip(factors, offsets, strict=True)
    ]
    return [
        xxhash.xxh3_64_intdigest(np.array(least[4 * band : 4 * band + 4], dtype=np.uint32).tobytes(), seed=band) >> 1
        for band in range(10)
    ]


def plain_numbers(query: str) -> int:
    found = "\0".join(_NUMBERS.findall(plain_normalised(query)))
    return xxhash.xxh3_64_intdigest(found.encode("utf-8", "replace")) >> 1


def plain_opening(query: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    words = tuple(sorted(plain_words(query)))
    return words, tuple(band ^ plain_numbers(query) for band in plain_bands(words))


def dumped(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def plain_reason(told: Reply) -> str:
    image = "it holds an image, of which only a reference is kept" if told.images else ""
    return "; ".join(filter(None, (told.prompt_reason, image)))


def plain_excluded(told: Reply) -> str:
    is_inexact = told.prompt_reason == NOT_RECORDED
    names = ["image" if told.images else "", "inexact" if is_inexact else ""]
    of_tools = exclusion_of_tools(told.tools, told.trajectory)
    return "" if told.skip else " ".join(filter(None, (*names, of_tools)))


def plain_line(told: Reply, source: str) -> bytes:
    pair = f"{told.query}\n{told.answer}".encode("utf-8", "surrogatepass")
    line = {
        "task_id": "t-" + hashlib.sha256(f"{told.trace_id}\0{told.span_id}".encode()).hexdigest()[:20],
        "main_query": told.query,
        "init_messages": list(told.history),
        "env_type": "no_env",
        "question": told.query,
        "answer": told.answer,
        "prompt": [*told.history, {"role": "user", "content": told.request or told.query}],
        "metadata": {
            "answer": told.answer,
            "qa_hash": hashlib.sha256(pair).hexdigest(),
            "source": source,
            "trace_id": told.trace_id,
            "span_id": told.span_id,
            "conversation_id": told.conversation_id,
            "user_id": told.user,
            "agent_name": told.agent,
            "model": told.model,
            "adapter": told.adapter,
            "turn": told.turn,
            "started_at": told.started_at.isoformat(),
            "ended_at": told.ended_at.isoformat(),
            "service": told.service,
            "input_tokens": told.input_tokens,
            "output_tokens": told.output_tokens,
            "prompt_tokens": told.prompt_tokens,
            "tools_json": dumped(list(told.tools)),
            "trajectory_json": dumped(list(told.trajectory)),
            "structured_json": dumped(told.structured),
            "images_json": dumped(list(told.images)),
            "errors_json": dumped(list(told.errors)),
            "answer_reasoning": told.reasoning,
            "refusal": told.is_refusal,
            "reference": told.reference,
            "adapter_source": told.adapter_source,
            "prompt_exact": not plain_reason(told),
            "prompt_reason": plain_reason(told),
            "prompt_source": "trace",
            "parameters_json": "{}",
            "extra_json": "{}",
            "split": "train",
        },
    }
    return dumped(line).encode("utf-8", "replace")


def plain_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def plain_beginning(told: Reply) -> int:
    """System prompt, tools and first question, as they are."""
    asked = {"role": "user", "content": told.request or told.query}
    messages = [*told.history, asked]
    until = next(place for place, message in enumerate(messages) if message.get("role") == "user")
    metadata = json.loads(plain_line(told, ""))["metadata"]
    parts = [metadata["tools_json"], metadata["images_json"]]
    for message in messages[: until + 1]:
        parts += [str(message.get("role")), str(message.get("content"))]
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode("utf-8", "replace")) >> 1


def plain_entry(told: Reply, source: str) -> Entry:
    line = plain_line(told, source)
    skip = "None" if told.skip is None else told.skip.value
    return Entry(
        span_id=told.span_id,
        trace_id=told.trace_id,
        conversation_id=plain_text(told.conversation_id),
        agent=plain_text(told.agent),
        adapter=plain_text(told.adapter),
        started_at=told.started_at.isoformat(),
        key="t-" + hashlib.sha256(f"{told.trace_id}\0{told.span_id}".encode()).hexdigest()[:20],
        line=b"" if told.skip else line,
        content=xxhash.xxh3_64_intdigest(line, seed=xxhash.xxh32_intdigest(skip.encode())) >> 1,
        beginning=0 if told.skip else plain_beginning(told),
        words=b"" if told.skip or told.turn else np.array(plain_opening(told.query)[0], dtype=np.uint32).tobytes(),
        numbers=0 if told.skip or told.turn else plain_numbers(told.query),
        linked=not told.history and not told.model,
        excluded=plain_excluded(told),
        model=("" if told.adapter else "@base") if told.adapter_source == "id" else plain_text(told.model),
        follows=not plain_reason(told) and any(one.get("role") == "assistant" for one in told.history),
        skip=told.skip,
        detail=plain_text(told.skip_detail),
        structure="" if told.skip else class_of(told).value,
        user=plain_text(told.user),
        service=plain_text(told.service),
    )


KOLKATA = timezone(timedelta(hours=5, minutes=30))
OLD_PARIS = timezone(timedelta(minutes=9, seconds=21))
TEXTS = [
    "",
    "?!",
    "- -",
    "What is 90% of 160?",
    "Compute 3 + 4*x - y/2 = 1,000.50, at 12:30: C# or F#?",
    "3. * x, 3) * x; a - b, ab - cd; 5-3 well-known -7 1.2.3",
    "STRASSE Straße Ｗｈａｔ ９０％ cafe\u0301 zero\u200bwidth ×÷\N{MINUS SIGN}",
    "今天北京的天气怎么样？3 + 4 東京の天気を教えて 한국어 ภาษาไทย",
    "👍 \ufe0f$5|~<b>`x`_y_\x00\x1c\x85\u2028end",
    "half \ud83d an emoji",
    "the same word the same word THE SAME word",
]
REPLIES = {
    **{f"text {place}": reply(place, query=text) for place, text in enumerate(TEXTS)},
    "full": reply(
        1,
        query="Add these.",
        request="another agent's text",
        model="m",
        adapter="m@r0001",
        history=({"role": "system", "content": "s"}, {"role": "user", "content": "é"}),
        trajectory=({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},),
        tools=({"type": "function", "function": {"name": "add"}},),
        images=("https://x/y.png",),
        structured={"a": [1, 2.5, None]},
        errors=("tool add: ValueError: ü",),
        reference="3",
        service="s",
        user="u",
        input_tokens=3,
        output_tokens=4,
        started_at=START.replace(microsecond=12),
        ended_at=START.astimezone(KOLKATA),
    ),
    "bare": reply(2, history=(), conversation_id=""),
    "later": reply(3, turn=2, history=({"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"})),
    "inexact": reply(3, model="m", prompt_tokens=7, prompt_reason=NOT_RECORDED),
    "by its id": reply(3, model="m", adapter="m@r0001", adapter_source="id"),
    "skipped": reply(4, skip=SkipReason.UNFINISHED, skip_detail="no answer yet", answer=""),
    "beyond 64 bits": reply(5, structured={"n": 2**70}, trajectory=({"n": 2**70},)),
    "lone surrogates": reply(6, answer="\ud83d", tools=({"name": "\udc00"},), errors=("\ud83d",)),
}


@for_each("one", REPLIES.values())
def test_an_entry_is_what_the_plain_formula_says(one: Reply) -> None:
    assert entry_of(one, "/data/a.db") == plain_entry(one, "/data/a.db")


def test_many_at_once_are_what_each_is_by_itself() -> None:
    assert similarity.prompt_signatures(TEXTS) == [plain_opening(text) for text in TEXTS]
    assert similarity.prompt_signatures(()) == []


def test_questions_of_any_length_share_their_work() -> None:
    """One is longer than what is done at once, and the others do not fit beside each other."""
    lengths = [1, 4095, 1, 0, 5000, 3, 2000, 2000, 200, 0]
    questions = [" ".join(f"w{number + length}" for number in range(length)) for length in lengths]
    assert similarity.prompt_signatures(questions) == [plain_opening(question) for question in questions]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
any_text = st.text(st.characters(), max_size=60)
"""Lone surrogates, too."""
marked_text = st.text(st.sampled_from("ab cD7 08.,:-*/%^#+<=>|~$?(\"'\n\t\x1c_äß今天京\u200b×−３²👍"), max_size=40)
"""Dense in what the folding and the numbers look at."""
times = st.datetimes(
    min_value=datetime(1971, 1, 1),
    max_value=datetime(2100, 1, 1),
    timezones=st.sampled_from([UTC, KOLKATA, OLD_PARIS]),
)
replies = st.builds(
    Reply,
    span_id=st.text(max_size=16),
    trace_id=st.text(max_size=16),
    conversation_id=any_text,
    agent=any_text,
    query=any_text | marked_text,
    answer=any_text,
    started_at=times,
    ended_at=times,
    request=any_text,
    model=st.sampled_from(["", "m"]),
    adapter=any_text,
    is_refusal=st.booleans(),
    turn=st.integers(0, 2),
    history=st.lists(objects, max_size=2).map(tuple),
    trajectory=st.lists(objects, max_size=2).map(tuple),
    tools=st.lists(objects, max_size=2).map(tuple),
    images=st.lists(any_text, max_size=2).map(tuple),
    structured=st.none() | objects,
    errors=st.lists(any_text, max_size=2).map(tuple),
    reference=any_text,
    service=any_text,
    user=any_text,
    input_tokens=st.integers(0, 2**64),
    output_tokens=st.integers(0, 9),
    skip=st.none() | st.sampled_from(SkipReason),
    skip_detail=any_text,
)


@given(replies)
def test_any_reply_is_stored_as_the_plain_formula_says(told: Reply) -> None:
    assert entry_of(told, "/data/ä.db") == plain_entry(told, "/data/ä.db")


@given(marked_text | st.text(max_size=80) | st.text(st.characters(max_codepoint=127), max_size=80))
def test_any_text_is_compared_by_what_the_plain_formula_says(text: str) -> None:
    assert similarity.normalised(text) == plain_normalised(text)
    assert similarity.words(text) == plain_words(text)
    assert similarity.numbers(text) == tuple(_NUMBERS.findall(plain_normalised(text)))
    assert similarity.prompt_signatures([text])[0] == plain_opening(text)


def test_more_words_than_are_remembered_are_hashed_the_same() -> None:
    for start in range(0, 40_000, 1000):
        text = " ".join(f"w{number}" for number in range(start, start + 1000))
        assert similarity.words(text) == {xxhash.xxh32_intdigest(word.encode()) for word in text.split()}
    assert similarity.words("x" * 1000) == {xxhash.xxh32_intdigest(b"x" * 1000)}
