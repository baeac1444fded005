"""The index of tools: what is found, in which order, and with what."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flywheel
from flywheel.errors import ConfigError
from flywheel.retrieval.encoder import EncoderOptions
from flywheel.retrieval.pairs import Calls
from flywheel.retrieval.texts import MOST_CHARACTERS, MOST_MESSAGES, query_texts, tool_text
from flywheel.retrieval.tool_index import RECORD, Method, Ranking, method_of
from flywheel.retrieval.trained_encoder import train_encoder

Json = dict[str, Any]


def tool(name: str, description: str = "", **parameters: str) -> Json:
    properties = {key: {"type": "string", "description": about} for key, about in parameters.items()}
    function = {"name": name, "description": description, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


BOOK = tool("bookFlight", "Reserve a seat on a plane", airport="Where it leaves")
WEATHER = tool("get_weather", "The forecast of a city")
TRAIN = tool("预订火车票", "预订火车上的座位")
TOOLS = [BOOK, WEATHER, TRAIN]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("Please book something", BOOK),
        ("From which AIRPORT?", BOOK),
        ("the weather", WEATHER),
        ("我要预订车票", TRAIN),
    ],
)
def test_bm25_finds_words_of_names_descriptions_and_parameters(asked: str, expected: Json) -> None:
    assert flywheel.ToolIndex(None, TOOLS).search([user(asked)], 1) == [expected]


def test_what_has_no_word_in_common_is_not_found() -> None:
    index = flywheel.ToolIndex(None, TOOLS)
    assert index.search([user("zebra")]) == index.search([]) == index.search([user("?!")]) == []
    assert index.search([{"role": "system", "content": "weather"}, user("zebra")]) == []
    assert flywheel.ToolIndex(None, []).search([user("weather")]) == []
    assert flywheel.ToolIndex(None, [tool("__")]).search([user("weather")]) == []


def test_the_result_is_the_definition_that_was_given() -> None:
    flat = {"name": "get_weather", "description": "of a city", "parameters": {}}
    assert flywheel.ToolIndex(None, [BOOK, flat]).search([user("city")], 5) == [flat]
    # Of two with one name, the last counts.
    assert flywheel.ToolIndex(None, [WEATHER, flat]).search([user("weather")], 5) == [flat]


@given(st.lists(st.sampled_from(["a b", "b c", "c d e", "x"]), min_size=1, max_size=12), st.integers(0, 15))
def test_search_gives_distinct_tools_and_at_most_k(descriptions: list[str], k: int) -> None:
    tools = [tool(f"t{number}", text) for number, text in enumerate(descriptions)]
    found = flywheel.ToolIndex(None, tools).search([user("a b c")], k)
    names = [each["function"]["name"] for each in found]
    matching = sum(set(text.split()) & set("abc") != set() for text in descriptions)
    assert len(names) == len(set(names)) == min(k, matching)


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_equal_scores_keep_their_order(k: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 4, 30).astype(np.float32)
    ranking = Ranking(["t"] * 30, Method.ENCODER, scores[:, None])
    expected = sorted(range(30), key=lambda place: (-scores[place], place))[:k]
    assert ranking.best((), np.ones(1, np.float32), k) == expected


def test_fusion_prefers_what_both_rankings_have_early() -> None:
    texts = ["apple pear", "apple", "pear", "plum"]
    vectors = np.array([[0.8], [0.9], [0.1], [1.0]], np.float32)
    one = np.ones(1, np.float32)
    assert Ranking(texts, Method.BM25).best(("apple pear",), None, 4) == [0, 1, 2]
    assert Ranking(texts, Method.ENCODER, vectors).best(("apple pear",), one, 4) == [3, 1, 0, 2]
    # 1/61 + 1/63, 1/62 + 1/62, 1/63 + 1/64 and 1/61.
    assert Ranking(texts, Method.FUSION, vectors).best(("apple pear",), one, 4) == [0, 1, 2, 3]
    # Without a word in common, the encoder alone answers.
    assert Ranking(texts, Method.FUSION, vectors).best(("zebra",), one, 4) == [3, 1, 0, 2]


def test_a_query_is_what_was_said_from_the_end() -> None:
    result = {"role": "tool", "content": "done"}
    reminder = user("<system-reminder>It is noon</system-reminder>")
    parts = {"role": "user", "content": [{"type": "text", "text": "newest"}, {"type": "image_url"}]}
    call = {"role": "assistant", "content": None, "tool_calls": []}
    said = {"role": "assistant", "content": "said"}
    told = [{"role": "system", "content": "s"}, user("old"), said, parts, reminder, call, result]
    assert query_texts(told) == ("newest", "said", "old")
    assert sum(map(len, query_texts([user("older"), user("o" * 3000), parts]))) == MOST_CHARACTERS
    assert query_texts([user(str(number)) for number in range(20)]) == tuple(
        map(str, range(19, 19 - MOST_MESSAGES, -1))
    )


def test_the_newest_message_counts_most() -> None:
    index = flywheel.ToolIndex(None, TOOLS)
    assert index.search([user("weather"), user("now my seat")], 2) == [BOOK, WEATHER]
    assert index.search([user("my seat"), user("now weather")], 2) == [WEATHER, BOOK]
    # What the newest message does not say, the one before does.
    assert index.search([user("my seat"), user("yes!")], 2) == [BOOK]


def test_the_text_of_a_tool_survives_odd_definitions() -> None:
    assert tool_text({"name": "getHTTPPage2"}) == "get HTTPPage2"
    assert tool_text({"name": "a_b", "description": 3, "parameters": {"properties": {"c": None}}}) == "a b\nc"
    assert tool_text({"name": "a", "parameters": []}) == "a"


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tool 2 has no name") as unnamed:
        flywheel.ToolIndex(None, [BOOK, {"type": "function"}])
    assert "OpenAI" in unnamed.value.hint
    with pytest.raises(ConfigError, match="no such directory"):
        flywheel.ToolIndex(tmp_path / "none", TOOLS)
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        flywheel.ToolIndex(str(tmp_path), TOOLS)


def test_the_record_of_a_directory_says_the_method(tmp_path: Path) -> None:
    assert method_of(tmp_path) is Method.FUSION
    (tmp_path / RECORD).write_text(json.dumps({"method": "bm25"}))
    index = flywheel.ToolIndex(tmp_path, TOOLS)
    assert index.method is Method.BM25
    assert index.search([user("weather")]) == [WEATHER]


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"bm25s is not installed.*pip install .*\[retrieval\]"):
        flywheel.ToolIndex(None, TOOLS)
    with pytest.raises(ConfigError, match=r"bm25s.* not installed"):
        train_encoder(Calls(), "base", tmp_path / "out", EncoderOptions(), 4)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match=r"sentence_transformers is not installed.*\[retrieval\]"):
        flywheel.ToolIndex(tmp_path, TOOLS)


def test_the_page_shows_a_search_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text()
    defined: dict[str, Any] = {}
    exec(re.findall(r"```\n(import flywheel.*?)```", page, re.DOTALL)[0], defined)
    assert [each["function"]["name"] for each in defined["offered"]] == ["get_weather"]
