"""Replies whose model calls the server has recorded: what was sent, whatever the trace shows, and waiting for it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.config.ingest import IngestSettings
from flywheel.records import exclusion
from flywheel.records.exclusion import Exclusion, TrainedModels
from flywheel.records.request_id import new_request_id, recorded_in, request_id_in
from flywheel.records.states import SkipReason
from flywheel.records.task import Entry
from flywheel.records.trace import ModelAnswer, ModelCall, ReplySelection, sends_reasoning
from flywheel.sources.spans.replies import extract
from flywheel.sources.studio.reader import StudioReader
from flywheel.sources.studio.schema import SCHEMAS, packed
from tests.factories.model_call import HIDING, MARK, REMINDER, SENT, marked, recorded_call
from tests.sources.studio.reading import NOW, Ledger, raw_traces
from tests.sources.studio.writer import Studio, agent, chat, tool

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
SECOND = new_request_id("0" * 16, "my-agent@r0008")


def entries(path: Path, *spans: dict[str, Any], calls: Collection[ModelCall] = ()) -> dict[str, Entry]:
    studio = Studio(path / "studio.sqlite")
    studio.write(*spans)
    schema, traces = raw_traces(studio.path)
    selection = ReplySelection(models=TrainedModels("my-agent", "/models/base"))
    found = extract(traces, schema, selection, "/a", {call.request_id: call for call in calls})
    return {entry.span_id: entry for entry in found.entries}


def line(entry: Entry) -> Any:
    return orjson.loads(entry.line)


def test_the_prompt_is_what_was_sent_also_if_the_trace_has_it_cut(tmp_path: Path) -> None:
    row = marked(chat("c", [], "2", parent="a"), input={"messages": json.dumps(HIDING)[:80]})
    for calls, skip, is_exact in (([], None, False), ([recorded_call()], None, True)):
        folder = tmp_path / f"{is_exact}"
        folder.mkdir()
        entry = entries(folder, row, agent("a", ended=2), calls=calls)["a"]
        assert (entry.skip, line(entry)["metadata"]["prompt_exact"]) == (skip, is_exact)


def test_the_prompt_is_what_was_sent(tmp_path: Path) -> None:
    spans = (marked(chat("c", HIDING, "2", parent="a")), agent("a", ended=2))
    entry = entries(tmp_path, *spans, calls=[recorded_call()])["a"]
    task = line(entry)
    assert task["prompt"] == [
        {"role": "system", "content": "You do sums.", "name": "system"},
        {"role": "user", "content": "What is 1 + 1?", "name": "user"},
        {"role": "user", "content": REMINDER, "name": "user"},
    ]
    assert (task["main_query"], task["answer"]) == ("What is 1 + 1?", "2")
    assert task["init_messages"] == [
        {"role": "system", "content": "You do sums."},
        {"role": "user", "content": REMINDER},
    ]
    about = task["metadata"]
    assert (about["prompt_exact"], about["prompt_reason"], about["prompt_source"]) == (True, "", "calls")
    assert about["parameters_json"] == '{"temperature":0.5}'
    assert (about["adapter"], about["adapter_source"]) == ("my-agent@r0007", "id")
    assert (about["prompt_tokens"], about["input_tokens"], about["output_tokens"]) == (42, 42, 5)
    assert about["turn"] == 0
    assert (entry.calls, entry.missing, entry.excluded, entry.follows) == ((MARK,), (), "", False)


def test_without_its_call_the_prompt_is_that_of_the_trace(tmp_path: Path) -> None:
    entry = entries(tmp_path, marked(chat("c", HIDING, "2", parent="a")), agent("a", ended=2))["a"]
    about = line(entry)["metadata"]
    assert (about["prompt_reason"], about["prompt_source"]) == (exclusion.HIDDEN_MESSAGE, "trace")
    assert about["parameters_json"] == "{}"
    assert (entry.calls, entry.missing, entry.excluded) == ((MARK,), (MARK,), Exclusion.HIDDEN)


def test_a_client_that_records_no_input_has_an_exact_prompt(tmp_path: Path) -> None:
    spans = (marked(chat("c", [], "2", parent="a")), agent("a", ended=2))
    assert line(entries(tmp_path, *spans, calls=[recorded_call()])["a"])["metadata"]["prompt_exact"]


def test_steps_and_tools_are_those_of_the_calls(tmp_path: Path) -> None:
    asked = recorded_call(answers=(ModelAnswer(tool_calls=(CALL,), finish_reason="tool_calls"),), tools=(TOOL,))
    result = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}
    after = recorded_call(
        SECOND, messages=(*SENT, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result)
    )
    spans = (
        marked(chat("c0", [], parent="a", ended=1)),
        tool("t", "c1", "add", "two", parent="a", began=1, ended=2),
        marked(chat("c1", [], "2", parent="a", began=2, ended=3), SECOND),
        agent("a", ended=4),
    )
    entry = entries(tmp_path, *spans, calls=[asked, after])["a"]
    about = line(entry)["metadata"]
    assert json.loads(about["tools_json"]) == [TOOL]
    assert json.loads(about["trajectory_json"]) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "two"},
    ]
    assert len(line(entry)["prompt"]) == 3
    assert entry.calls == (MARK, SECOND)
    assert (about["adapter"], about["input_tokens"], about["prompt_tokens"]) == ("my-agent@r0008", 84, 42)
    assert entry.excluded == Exclusion.TOOLS


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", None])
def test_a_step_says_whether_the_next_call_was_sent_its_reasoning_again(tmp_path: Path, key: str | None) -> None:
    asked = recorded_call(answers=(ModelAnswer(reasoning="1 and 1.", tool_calls=(CALL,)),), tools=(TOOL,))
    said = {"role": "assistant", "content": None, "tool_calls": [CALL], **({key: "1 and 1."} if key else {})}
    after = recorded_call(SECOND, messages=(*SENT, said, {"role": "tool", "tool_call_id": "c1", "content": "2"}))
    spans = (
        marked(chat("c0", [], parent="a", ended=1)),
        marked(chat("c1", [], "2", parent="a", began=2, ended=3), SECOND),
        agent("a", ended=4),
    )
    task = line(entries(tmp_path, *spans, calls=[asked, after])["a"])
    steps = json.loads(task["metadata"]["trajectory_json"])
    assert [step.get("reasoning_content") for step in steps] == ["1 and 1.", None]
    assert [step.get("reasoning_sent", True) for step in steps] == [key is not None, True]
    assert sends_reasoning([*task["prompt"], *steps]) is (key is not None)


@pytest.mark.parametrize(
    ("values", "reasoning"),
    [
        ({}, "1 and 1 is 2."),
        ({"is_interrupted": True}, ""),
        ({"answers": (ModelAnswer(content="3", reasoning="1 and 1 is 3."),)}, ""),
        ({"answers": (ModelAnswer(content="2"),)}, ""),
    ],
)
def test_the_answers_own_reasoning_is_kept(tmp_path: Path, values: dict[str, Any], reasoning: str) -> None:
    """That of the call which gave the answer, as the agent returned it; not what came before a tool's call."""
    asked = recorded_call(answers=(ModelAnswer(reasoning="I add.", tool_calls=(CALL,)),), tools=(TOOL,))
    answers = (ModelAnswer(content="2", reasoning="1 and 1 is 2.\n"),)
    after = recorded_call(SECOND, **{"answers": answers, **values})
    spans = (
        marked(chat("c0", [], parent="a", ended=1)),
        marked(chat("c1", [], "2", parent="a", began=2, ended=3), SECOND),
        agent("a", ended=4),
    )
    about = line(entries(tmp_path, *spans, calls=[asked, after])["a"])["metadata"]
    assert about["answer_reasoning"] == reasoning
    (tmp_path / "without").mkdir()
    about = line(entries(tmp_path / "without", *spans, calls=[asked])["a"])["metadata"]
    assert about["answer_reasoning"] == ""


def test_parts_are_in_the_prompt_as_vllm_renders_them(tmp_path: Path) -> None:
    """A refusal under a key of its own is not rendered, nor is an empty part."""
    parts = [
        {"type": "thinking", "thinking": "1 and 1."},
        {"type": "text", "text": ""},
        {"type": "output_text", "text": "2"},
        {"type": "refusal", "refusal": "No more."},
    ]
    sent = (
        SENT[0],
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": None, "refusal": "No."},
        SENT[1],
    )
    spans = (marked(chat("c", [], "2", parent="a")), agent("a", ended=2))
    task = line(entries(tmp_path, *spans, calls=[recorded_call(messages=sent)])["a"])
    assert [message["content"] for message in task["prompt"][1:4]] == ["1 + 1?", "1 and 1.\n2\nNo more.", ""]
    assert all("refusal" not in message for message in task["prompt"])
    assert task["metadata"]["prompt_exact"]


def test_a_refusal_is_an_answer_and_the_first_of_several_is_said(tmp_path: Path) -> None:
    answers = (ModelAnswer(content="I cannot.", is_refusal=True), ModelAnswer(content="2"))
    spans = (marked(chat("c", [], parent="a")), agent("a", "What is 1 + 1?", "I cannot.", ended=2))
    entry = entries(tmp_path, *spans, calls=[recorded_call(answers=answers)])["a"]
    task = line(entry)
    assert (task["answer"], task["metadata"]["refusal"]) == ("I cannot.", True)
    assert (entry.skip, entry.detail) == (None, "first of 2 answers to the last model call")


def test_only_the_first_call_that_was_answered_has_the_prompt(tmp_path: Path) -> None:
    failed = chat("c0", SENT[:1], parent="a", ended=1, code=2, message="overloaded")
    spans = (failed, marked(chat("c1", HIDING, "2", parent="a", began=1, ended=2)), agent("a", ended=3))
    (tmp_path / "failed").mkdir()
    assert (
        line(entries(tmp_path / "failed", *spans, calls=[recorded_call()])["a"])["metadata"]["prompt_source"]
        == "calls"
    )
    lost = marked(chat("c0", HIDING, "one moment", parent="a", ended=1), SECOND)
    (tmp_path / "lost").mkdir()
    entry = entries(tmp_path / "lost", lost, *spans[1:], calls=[recorded_call()])["a"]
    assert line(entry)["metadata"]["prompt_source"] == "trace", "its first call was not found"
    assert (entry.calls, entry.missing) == ((SECOND, MARK), (SECOND,))


PICTURE = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"parameters": {"chat_template_kwargs": {"enable_thinking": False}}}, exclusion.TEMPLATE_PARAMETERS),
        ({"parameters": {"add_generation_prompt": False}}, exclusion.TEMPLATE_PARAMETERS),
        ({"parameters": {"add_generation_prompt": True, "chat_template": None, "top_k": 5}}, ""),
        ({"messages": ({"role": "user", "content": [*SENT[1]["content"], PICTURE]},)}, exclusion.IMAGE),
    ],
)
def test_what_an_exact_prompt_cannot_repeat_is_said(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    spans = (marked(chat("c", HIDING, "2", parent="a")), agent("a", ended=2))
    about = line(entries(tmp_path, *spans, calls=[recorded_call(**values)])["a"])["metadata"]
    assert (about["prompt_reason"], about["prompt_source"]) == (reason, "calls")
    if reason == exclusion.IMAGE:
        assert about["images_json"] == '["https://x/y.png"]'


def test_the_answer_of_an_interrupted_call_is_that_of_the_trace(tmp_path: Path) -> None:
    cut = recorded_call(answers=(ModelAnswer(content="No"),), is_interrupted=True)
    spans = (marked(chat("c", HIDING, "2", parent="a")), agent("a", "What is 1 + 1?", "2", ended=2))
    task = line(entries(tmp_path, *spans, calls=[cut])["a"])
    assert (task["answer"], task["metadata"]["trajectory_json"]) == ("2", "[]")
    assert task["metadata"]["prompt_source"] == "calls"


def found_alone(span_id: str, **more: Any) -> dict[str, Any]:
    row = agent(span_id, None, None, name="my-agent", **more)
    attributes = json.loads(row["attributes"]) | {"flywheel": {"root_conversation": "calls-1"}}
    return row | {"attributes": json.dumps(attributes)}


def test_an_agent_that_was_found_in_the_calls_alone_is_a_reply(tmp_path: Path) -> None:
    spans = (marked(chat("c", None, parent="a")), found_alone("a", ended=2))
    entry = entries(tmp_path, *spans, calls=[recorded_call()])["a"]
    task = line(entry)
    assert (task["main_query"], task["answer"], entry.skip) == ("What is 1 + 1?", "2", None)
    assert [each["content"] for each in task["prompt"]] == ["You do sums.", "What is 1 + 1?", REMINDER]
    assert entries(tmp_path, *(), calls=[])["a"].skip is SkipReason.NO_ANSWER, "its calls were pruned"


contents = st.none() | st.booleans() | st.integers() | st.text() | st.floats()
values = st.recursive(
    contents,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "role", "content", "function", "name", "id", "image_url", "tool_calls", "x"]
            ),
            inner | st.sampled_from(["text", "image_url", "tool", "user", "assistant"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)
odd_messages = st.dictionaries(
    st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "parts", "reasoning", "x"]),
    values | st.sampled_from(["user", "assistant", "tool", "system"]),
    max_size=6,
)
json_objects = st.dictionaries(st.text(max_size=5), values, max_size=3)


@pytest.mark.slow
@given(
    messages=st.lists(odd_messages, max_size=4),
    tools=st.lists(json_objects, max_size=2),
    parameters=json_objects,
    names=st.lists(st.text() | st.just("generate_response"), max_size=2),
    content=st.text(),
    alone=st.booleans(),
)
def test_whatever_a_client_sends_makes_a_reply(
    messages: list[Any], tools: list[Any], parameters: dict[str, Any], names: list[str], content: str, alone: bool
) -> None:
    made = [{**CALL, "function": {"name": name, "arguments": content}} for name in names]
    answer = ModelAnswer(content=content, tool_calls=tuple(made))
    call = recorded_call(messages=tuple(messages), tools=tuple(tools), parameters=parameters, answers=(answer,))
    spans = (
        marked(chat("c", HIDING, "2", parent="a")),
        found_alone("a", ended=2) if alone else agent("a", ended=2),
    )
    schema = SCHEMAS["generation 2"]
    rows = {
        number: packed((number, *(encoded(row.get(name)) for name in schema.columns)))
        for number, row in enumerate(spans, 1)
    }
    done = extract([(rows, False)], SCHEMAS["generation 2"], ReplySelection(), "/a", {MARK: call})
    assert [entry.span_id for entry in done.entries] == ["a"]
    for entry in done.entries:
        if entry.line:
            task = line(entry)
            assert all(isinstance(each["role"], str) and isinstance(each["content"], str) for each in task["prompt"])
            assert len(task["prompt"]) == len(messages) or task["metadata"]["prompt_source"] == "trace"


def encoded(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def test_only_ids_count_as_marks() -> None:
    told = json.dumps({"text": json.dumps({"id": f"chatcmpl-{MARK}"}), "more": f"id: {MARK}"})
    assert recorded_in(told.encode()) == []
    assert recorded_in(json.dumps({"id": f"chatcmpl-{MARK}"}).encode()) == [MARK]
    assert recorded_in(f'{{"gen_ai.response.id":"{MARK}"}}'.encode()) == [MARK]
    assert (request_id_in(f"chatcmpl-{MARK}"), request_id_in("chatcmpl-1")) == (MARK, None)


class Pulled(dict[str, int]):
    """The calls that were pulled, by size. `asked` counts the questions."""

    asked = 0
    path = Path(__file__)

    def find(self, request_ids: Collection[str]) -> dict[str, Any]:
        return {}

    def sizes(self, request_ids: Collection[str]) -> Mapping[str, int]:
        self.asked += 1
        return {each: self[each] for each in request_ids if each in self}


def spans_that_end_at_now() -> tuple[dict[str, Any], ...]:
    found = (marked(chat("c", HIDING, "2", parent="a")), agent("a", ended=2))
    end = int(NOW.timestamp() * 1e9)
    return tuple(row | {"startTimeUnixNano": str(end - 10), "endTimeUnixNano": str(end)} for row in found)


@pytest.mark.parametrize("final", [False, True])
def test_a_reply_waits_for_its_calls_and_no_longer_than_that(tmp_path: Path, final: bool) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(*spans_that_end_at_now())
    pulled = Pulled()
    reader = StudioReader(studio.path, IngestSettings(calls_wait_seconds=30), call_sizes=pulled.sizes)
    ledger = Ledger(calls=pulled)

    def read(seconds: float) -> int:
        ledger.pass_(reader, now=NOW + timedelta(seconds=seconds), final=final)
        return ledger.extractions

    assert read(5) == 0 and reader.awaits_calls
    assert reader.due_ns == int(NOW.timestamp() * 1e9) + 30_000_000_000
    asked = pulled.asked
    assert read(6) == 0
    assert pulled.asked <= asked + 2
    assert read(31) == 1 and not reader.awaits_calls
    reader.close()


def test_a_reply_goes_on_as_soon_as_its_calls_are_there(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(*spans_that_end_at_now())
    pulled = Pulled()
    reader = StudioReader(studio.path, IngestSettings(calls_wait_seconds=30), call_sizes=pulled.sizes)
    ledger = Ledger(calls=pulled)
    ledger.pass_(reader, now=NOW + timedelta(seconds=5))
    assert ledger.extractions == 0
    assert [checkpoint.trace_id for checkpoint in ledger.open_checkpoints()] == ["trace"]
    pulled[MARK] = 100
    ledger.pass_(reader, now=NOW + timedelta(seconds=6))
    assert (ledger.extractions, ledger.open_checkpoints()) == (1, [])
    reader.close()


def test_a_process_that_was_restarted_waits_on(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(*spans_that_end_at_now())
    ledger = Ledger(calls=Pulled())
    for seconds, expected in ((5, 0), (20, 0), (31, 1)):
        reader = StudioReader(studio.path, IngestSettings(calls_wait_seconds=30), call_sizes=Pulled().sizes)
        ledger.pass_(reader, now=NOW + timedelta(seconds=seconds))
        assert ledger.extractions == expected
        reader.close()


def test_large_calls_make_smaller_batches(tmp_path: Path) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    pulled = Pulled()
    for number in range(6):
        mark = new_request_id("0" * 16, "base")
        pulled[mark] = 5_000_000
        row = marked(chat(f"c{number}", HIDING, "2", parent=f"a{number}", trace=f"t{number}"), mark)
        studio.write(row, agent(f"a{number}", ended=2, trace=f"t{number}"))
    reader = StudioReader(studio.path, IngestSettings(), call_sizes=pulled.sizes)
    ledger = Ledger(calls=pulled)
    ledger.pass_(reader, final=True)
    assert ledger.counts == [1] * 6, "two of them have more than 8 MB"
    assert ledger.extractions == 6
    reader.close()
