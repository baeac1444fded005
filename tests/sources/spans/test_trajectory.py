"""What an agent did inside a reply: each call with its own result, whatever the calls are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.records.trace import ChatMessage, Reply, sends_reasoning
from flywheel.sources.spans import attributes as at
from flywheel.sources.spans.span import Span
from tests.sources.studio.reading import extracted
from tests.sources.studio.writer import agent, chat, message, part, tool

Step = tuple[str, str]


def call(call_id: str, name: str = "add", x: int = 1) -> dict[str, Any]:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": {"x": x}}


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [message("assistant", *parts)]


def returned(call_id: str, result: str) -> dict[str, Any]:
    return message("tool", {"type": "tool_call_response", "id": call_id, "response": result})


def told(path: Path, *spans: dict[str, Any]) -> Reply:
    return extracted(path, *spans)["a"]


def steps(many: tuple[ChatMessage, ...]) -> list[Step]:
    """Calls as id and name, results as name and text."""
    found: list[Step] = []
    for one in many:
        found += [(each["id"], each["function"]["name"]) for each in one.get("tool_calls", ())]
        if one["role"] == "tool":
            found.append((one["name"], one["content"]))
    return found


ASKED = [message("system", part("s")), message("user", part("q"))]


@pytest.mark.parametrize("ids", [("c0", "c1"), ("call_0", "call_0"), ("", "")])
@pytest.mark.parametrize("with_spans", [True, False])
def test_each_call_has_its_own_result_however_calls_are_numbered(
    tmp_path: Path, ids: tuple[str, str], with_spans: bool
) -> None:
    first, second = ids
    then = [*ASKED, *said(call(first)), returned(first, "R-one")]
    last = [*then, *said(call(second)), returned(second, "R-two")]
    tools = [
        tool("t0", first, "add", "R-one", parent="a", began=2, ended=3),
        tool("t1", second, "add", "R-two", parent="a", began=4, ended=5),
    ]
    reply = told(
        tmp_path,
        chat("m0", ASKED, said(call(first)), parent="a", began=1, ended=2),
        chat("m1", then, said(call(second)), parent="a", began=3, ended=4),
        chat("m2", last, "done", parent="a", began=5, ended=6),
        *(tools if with_spans else ()),
        agent("a", "q", "done", began=0, ended=7),
    )
    assert steps(reply.trajectory) == [(first, "add"), ("add", "R-one"), (second, "add"), ("add", "R-two")]


def test_calls_of_one_id_have_the_results_of_their_names(tmp_path: Path) -> None:
    reply = told(
        tmp_path,
        chat("m0", ASKED, said(call("0", "add"), call("0", "multiply")), parent="a", began=1, ended=2),
        tool("t0", "0", "multiply", "product", parent="a", began=2, ended=3),
        tool("t1", "0", "add", "sum", parent="a", began=3, ended=4),
        tool("t2", "0", "look", "by itself", parent="a", began=4, ended=5),
        agent("a", "q", "done", began=0, ended=7),
    )
    assert steps(reply.trajectory) == [
        ("0", "add"),
        ("0", "multiply"),
        ("add", "sum"),
        ("multiply", "product"),
        ("0", "look"),
        ("look", "by itself"),
    ]


@pytest.mark.parametrize("name", ["nope", "add"])
def test_a_call_without_a_span_takes_no_other_calls_result(tmp_path: Path, name: str) -> None:
    """AgentScope 2.x makes no span for a tool that is not there."""
    then = [*ASKED, *said(call("0", name)), returned("0", "ToolNotFoundError: no such tool")]
    reply = told(
        tmp_path,
        chat("m0", ASKED, said(call("0", name)), parent="a", began=1, ended=2),
        chat("m1", then, said(call("0")), parent="a", began=3, ended=4),
        tool("t1", "0", "add", "sum", parent="a", began=4, ended=5),
        chat("m2", then, "done", parent="a", began=5, ended=6),
        agent("a", "q", "done", began=0, ended=7),
    )
    wrong = "ToolNotFoundError: no such tool"
    assert steps(reply.trajectory) == [("0", name), (name, wrong), ("0", "add"), ("add", "sum")]


@pytest.mark.parametrize("minutes", [-10, 0, 10])
@pytest.mark.parametrize("ids", [("c0", "c1"), ("0", "0")])
def test_the_clock_of_a_tools_host_may_be_wrong(tmp_path: Path, ids: tuple[str, str], minutes: int) -> None:
    """Nor are calls of one id distinguished by time if their arguments differ."""
    first, second = ids
    then = [*ASKED, *said(call(first)), returned(first, "R-one")]
    last = [*then, *said(call(second, x=2)), returned(second, "R-two")]
    away = minutes * 60
    reply = told(
        tmp_path,
        chat("m0", ASKED, said(call(first)), parent="a", began=1, ended=2),
        chat("m1", then, said(call(second, x=2)), parent="a", began=3, ended=4),
        chat("m2", last, "done", parent="a", began=5, ended=6),
        tool("t1", second, "add", "R-two", parent="a", began=4 + away, ended=5 + away, x=2),
        tool("t0", first, "add", "R-one", parent="a", began=2 + away, ended=3 + away),
        agent("a", "q", "done", began=0, ended=7),
    )
    assert steps(reply.trajectory) == [(first, "add"), ("add", "R-one"), (second, "add"), ("add", "R-two")]


def test_calls_that_differ_in_nothing_have_their_results_in_order(tmp_path: Path) -> None:
    then = [*ASKED, *said(call("0")), returned("0", "R-one")]
    last = [*then, *said(call("0")), returned("0", "R-two")]
    reply = told(
        tmp_path,
        chat("m0", ASKED, said(call("0")), parent="a", began=1, ended=2),
        chat("m1", then, said(call("0")), parent="a", began=3, ended=4),
        chat("m2", last, "done", parent="a", began=5, ended=6),
        tool("t0", "0", "add", "R-one", parent="a", began=602, ended=603),
        tool("t1", "0", "add", "R-two", parent="a", began=604, ended=605),
        agent("a", "q", "done", began=0, ended=7),
    )
    assert steps(reply.trajectory) == [("0", "add"), ("add", "R-one"), ("0", "add"), ("add", "R-two")]


def test_a_result_that_shares_its_id_with_a_finished_answer_stays_in_the_history(tmp_path: Path) -> None:
    before = [
        *ASKED,
        *said(call("0", "generate_response")),
        returned("0", "handed in"),
        *said(call("0")),
        returned("0", "sum"),
        *said(call("0", "generate_response")),
        returned("0", "handed in again"),
        message("user", part("and now?")),
    ]
    reply = told(
        tmp_path, chat("m0", before, "done", parent="a", began=1, ended=2), agent("a", "and now?", "done", ended=7)
    )
    assert steps(reply.history) == [("0", "add"), ("add", "sum")]


def test_results_in_the_genai_form_have_text_id_and_name(tmp_path: Path) -> None:
    before = [
        *ASKED,
        *said(call("c1"), call("c2", "look")),
        message(
            "tool",
            {"type": "tool_call_response", "id": "c1", "response": "3"},
            {"type": "tool_call_response", "id": "c2", "response": {"found": True}},
        ),
        *said(part("It is 3.")),
        message("user", part("and now?")),
    ]
    reply = told(
        tmp_path, chat("m0", before, "done", parent="a", began=1, ended=2), agent("a", "and now?", "done", ended=7)
    )
    results = [one for one in reply.history if one["role"] == "tool"]
    assert [(one["tool_call_id"], one["name"], one["content"]) for one in results] == [
        ("c1", "add", "3"),
        ("c2", "look", '{"found": true}'),
    ]


def test_what_a_model_call_was_given_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls there are without a span of their own, and without a result."""
    looked: list[str] = []
    conversation = at.conversation

    def counted(span: Span) -> list[ChatMessage]:
        looked.append(span.span_id)
        return conversation(span)

    monkeypatch.setattr(at, "conversation", counted)
    spans = [agent("a", "q", "fine", began=0, ended=100)]
    given = list(ASKED)
    for place in range(10):
        calls = [call(f"c{place}-{number}") for number in range(20)]
        spans.append(chat(f"m{place}", given, said(*calls), parent="a", began=place, ended=place + 0.5))
        given = [
            *given,
            *said(*calls),
            *(returned(f"c{place}-{number}", f"R{place}-{number}") for number in range(5)),
        ]
    spans.append(chat("last", given, said(part("fine")), parent="a", began=50, ended=51))
    reply = told(tmp_path, *spans)
    results = [text for name, text in steps(reply.trajectory) if text.startswith("R")]
    assert results == [f"R{place}-{number}" for place in range(10) for number in range(5)]
    assert len(looked) <= 2 * 11, looked


def thinking(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": text}


def test_each_message_of_the_model_has_its_own_reasoning(tmp_path: Path) -> None:
    """The input that a trace shows proves nothing: AgentScope traces reasoning there that it does not send."""
    first = said(thinking("Add."), call("c0"))
    then = [*ASKED, *first, returned("c0", "2")]
    second = said(thinking("Again."), part("Once more."), call("c1"))
    last = [*then, *second, returned("c1", "4")]
    answer = said(thinking("Four."), part("It is 4."))
    reply = told(
        tmp_path,
        chat("m0", ASKED, first, parent="a", began=1, ended=2),
        chat("m1", then, second, parent="a", began=3, ended=4),
        chat("m2", last, answer, parent="a", began=5, ended=6),
        agent("a", "q", "It is 4.", began=0, ended=7),
    )
    about = [(each.get("reasoning_content"), each.get("reasoning_sent")) for each in reply.trajectory]
    assert about == [("Add.", False), (None, None), ("Again.", False), (None, None)]
    assert [each["content"] for each in reply.trajectory] == ["", "2", "Once more.", "4"]
    assert reply.reasoning == "Four."
    assert not sends_reasoning(reply.trajectory)
    assert all(each.keys() <= {"role", "content"} for each in reply.history), "it is what the model was sent"


def test_the_reasoning_of_an_answer_is_that_of_the_call_which_gave_it(tmp_path: Path) -> None:
    reply = told(
        tmp_path,
        chat("m0", ASKED, said(thinking("Hm."), part("draft")), parent="a", began=1, ended=2),
        agent("a", "q", "done", began=0, ended=3),
    )
    assert (reply.reasoning, [each.get("reasoning_content") for each in reply.trajectory]) == ("", ["Hm."])
