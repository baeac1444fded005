"""Which replies become tasks: what the user saw, and what the settings add or take away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply, ReplySelection
from tests.sources.studio.reading import by_id, extracted, read_all
from tests.sources.studio.writer import DATA, agent, chat, message, part, span, tool

SORRY = "I notice the interruption. How can I help you?"
ASKED = [message("system", part("s")), message("user", part("What is 1 + 1?"))]


def skips(replies: dict[str, Reply]) -> dict[str, SkipReason | None]:
    return {key: reply.skip for key, reply in replies.items()}


def test_a_single_agent_below_the_application_is_a_task(tmp_path: Path) -> None:
    found = extracted(tmp_path, agent("a", parent="root"), span("root", None, {}, ended=9))
    assert skips(found) == {"a": None}


def test_an_agent_below_an_agent_is_nested_however_deep(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        agent("inner", parent="step", began=2, ended=3, name="Worker"),
        span("step", None, {}, parent="tool", began=2, ended=3),
        tool("tool", "c", "ask", "2", parent="outer", began=1, ended=4),
        agent("outer", ended=5, name="Router"),
    )
    assert skips(found) == {"inner": SkipReason.NESTED, "outer": None}
    assert [call["function"]["name"] for m in found["outer"].trajectory for call in m.get("tool_calls", ())] == [
        "ask"
    ]


def test_a_pipeline_of_three_asks_what_the_user_asked(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        agent("one", "the question", "draft", name="A", parent="root", began=0, ended=1),
        agent("two", "draft", "better", name="B", parent="step", began=1, ended=2),
        span("step", None, {}, parent="root", began=1, ended=2),
        agent("three", "better", "final", name="C", parent="root", began=2, ended=3),
        span("root", None, {}, ended=4),
    )
    assert skips(found) == {"one": SkipReason.PIPELINE_STAGE, "two": SkipReason.PIPELINE_STAGE, "three": None}
    assert (found["three"].query, found["three"].request) == ("the question", "better")


def test_agents_side_by_side_in_time_are_all_seen(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        *(agent(f"a{i}", name=f"Solver_{i}", parent="root", began=i / 10, ended=5) for i in range(3)),
        span("root", None, {}, ended=6),
    )
    assert set(skips(found).values()) == {None}


def test_turns_of_one_agent_in_one_span_are_no_pipeline(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        agent("t1", "first question", "first answer", parent="root", began=0, ended=1),
        agent("t2", "second question", "second answer", parent="root", began=2, ended=3),
        span("root", None, {}, ended=4),
    )
    assert skips(found) == {"t1": None, "t2": None}
    assert found["t2"].query == "second question"


def test_an_agent_that_is_handed_its_own_answer_refines_it(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        agent("t1", "the question", "The train covers 1050 km.", parent="root", began=0, ended=1),
        agent("t2", "Improve this: The train covers 1050 km.", "better", parent="root", began=2, ended=3),
        span("root", None, {}, ended=4),
    )
    assert skips(found) == {"t1": SkipReason.PIPELINE_STAGE, "t2": None}
    assert found["t2"].query == "the question"


SHORT = [("What is 2 + 3?", "5"), ("What is 15 + 7?", "22"), ("Is 220 even?", "Yes"), ("Yes or no: is 3 odd?", "Yes")]
CAPITAL = [("What is the capital of France?", "Paris"), ("How many people live in Paris?", "2.1 million")]
OTHERS = [("Plan a trip to Rome", "Day 1: the Colosseum, in the morning"), ("What is 6 * 7?", "42")]
BEST_OF = [("What is 2 + 2?", "4")] * 3


@pytest.mark.parametrize(
    "turns, names", [(SHORT, "aaaa"), (CAPITAL, "aa"), (CAPITAL, "ab"), (OTHERS, "ab"), (BEST_OF, "aaa")]
)
def test_turns_that_mention_an_earlier_answer_are_no_pipeline(
    tmp_path: Path, turns: list[tuple[str, str]], names: str
) -> None:
    found = extracted(
        tmp_path,
        *(
            agent(f"t{place}", *turn, name=name, parent="root", began=2 * place, ended=2 * place + 1)
            for place, (turn, name) in enumerate(zip(turns, names, strict=True))
        ),
        span("root", None, {}, ended=20),
    )
    assert [(found[key].query, found[key].answer, found[key].skip) for key in sorted(found)] == [
        (*turn, None) for turn in turns
    ]


def test_an_agent_that_failed_is_no_stage_before_the_one_that_stepped_in(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        agent("a1", "the question", None, name="First", code=2, parent="root", began=0, ended=1),
        agent("a2", "the question", "an answer", name="Second", parent="root", began=2, ended=3),
        span("root", None, {}, ended=4),
    )
    assert skips(found) == {"a1": SkipReason.ERROR, "a2": None}


ASKS = "My invoice of May shows the wrong amount."


@pytest.mark.parametrize(
    ("answer", "handed"),
    [
        ("billing", ASKS),
        ("billing", f"Category: billing\nQuestion: {ASKS}"),
        ("The amount of May was charged twice.", "THE AMOUNT OF MAY\nWAS CHARGED TWICE."),
        ("42", [message("assistant", part("Check this answer: 42"))]),
    ],
)
def test_another_agent_that_is_handed_the_same_question_or_the_answer_goes_on(
    tmp_path: Path, answer: str, handed: Any
) -> None:
    found = extracted(
        tmp_path,
        agent("a1", ASKS, answer, name="First", parent="root", began=0, ended=1),
        agent("a2", handed, "It is corrected.", name="Second", parent="root", began=2, ended=3),
        span("root", None, {}, ended=4),
    )
    assert skips(found) == {"a1": SkipReason.PIPELINE_STAGE, "a2": None}
    assert (found["a2"].query, found["a2"].answer) == (ASKS, "It is corrected.")


def test_two_pipelines_in_one_session_ask_what_each_was_asked(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        agent("a1", "first question", "draft", name="A", parent="root", began=0, ended=1),
        agent("b1", "draft", "first answer", name="B", parent="root", began=1, ended=2),
        agent("a2", "second question", "sketch", name="A", parent="root", began=3, ended=4),
        agent("b2", "sketch", "second answer", name="B", parent="root", began=4, ended=5),
        span("root", None, {}, ended=6),
    )
    stage = SkipReason.PIPELINE_STAGE
    assert skips(found) == {"a1": stage, "b1": None, "a2": stage, "b2": None}
    assert [found[key].query for key in ("b1", "b2")] == ["first question", "second question"]


def test_a_subclass_that_delegates_is_one_reply_with_its_history(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        chat("c", ASKED, "2", parent="inner", ended=1),
        agent("inner", parent="outer", ended=2),
        agent("outer", ended=3),
    )
    assert skips(found) == {"inner": SkipReason.NESTED, "outer": None}
    assert found["outer"].history == ({"role": "system", "content": "s"},)
    assert found["outer"].input_tokens == 10


@pytest.mark.parametrize("name", ["old", "new_v1", "new_v2"])
def test_included_and_excluded_agents(name: str) -> None:
    path = DATA / f"{name}.sqlite"
    plain = by_id(read_all(path)[0])
    more = by_id(read_all(path, selection=ReplySelection(include=frozenset({"Solver"})))[0])
    changed = {key: more[key] for key in plain if plain[key].skip is not more[key].skip}
    assert len(changed) == 4
    assert {reply.agent for reply in changed.values()} == {"Solver"}
    assert all(reply.skip is None and reply.query == reply.request for reply in changed.values())

    less = by_id(read_all(path, selection=ReplySelection(exclude=frozenset({"Solver", "Checker"})))[0])
    excluded = {reply.agent for reply in less.values() if reply.skip is SkipReason.AGENT_EXCLUDED}
    assert excluded == {"Solver", "Checker"}
    assert all(less[key].skip is SkipReason.AGENT_EXCLUDED for key in plain if plain[key].agent in excluded)


def cancelled() -> list[dict[str, Any]]:
    return [{"name": "exception", "attributes": {"exception": {"type": "asyncio.CancelledError", "message": 0}}}]


@pytest.mark.parametrize(
    "spans",
    [
        [agent("a", answer=None, code=2, events=cancelled())],
        [chat("c", ASKED, "I was abou", reasons=["interrupted"], parent="a"), agent("a", answer=SORRY)],
        [chat("c", ASKED, code=2, events=cancelled(), parent="a"), agent("a", answer="custom words", ended=2)],
        [
            chat("c", ASKED, parent="a"),
            tool("t", "x", "slow", {"state": "interrupted", "content": []}, parent="a", began=2, ended=3),
            agent("a", answer=SORRY, ended=4),
        ],
        [
            tool("t", "x", "slow", "ToolResponse(content=[], is_interrupted=True, id='1')", parent="a"),
            agent("a", answer="custom words", ended=4),
        ],
        [chat("c", ASKED, "The answer would be", parent="a"), agent("a", answer=SORRY, ended=4)],
    ],
    ids=["cancelled", "finish reason", "cancelled model call", "tool state", "tool repr", "sentence of nobody"],
)
def test_interruption(spans: list[dict[str, Any]], tmp_path: Path) -> None:
    assert skips(extracted(tmp_path, *spans)) == {"a": SkipReason.INTERRUPTED}


@pytest.mark.parametrize(
    "spans",
    [
        [agent("a", answer=SORRY)],
        [chat("c", ASKED, SORRY, parent="a"), agent("a", answer=SORRY, ended=2)],
        [
            chat("c", ASKED, "x", reasons=["interrupted"], parent="a"),
            chat("c2", ASKED, "2", parent="a", began=1, ended=2),
            agent("a", ended=3),
        ],
    ],
    ids=["a sentence alone", "the model said it", "it went on"],
)
def test_no_interruption(spans: list[dict[str, Any]], tmp_path: Path) -> None:
    assert skips(extracted(tmp_path, *spans)) == {"a": None}


def test_errors_and_missing_texts(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        agent("failed", trace="1", code=2, message="it broke"),
        agent("silent", answer=None, trace="2"),
        agent("mute", asked="  \n ", trace="3"),
        agent("unasked", asked=None, trace="4"),
        agent("empty", answer=[message("assistant")], trace="5"),
        agent(
            "shown",
            asked=[message("user", {"type": "uri", "uri": "https://x/y.png", "modality": "image"})],
            trace="6",
        ),
    )
    assert skips(found) == {
        "failed": SkipReason.ERROR,
        "silent": SkipReason.NO_ANSWER,
        "mute": SkipReason.NO_QUERY,
        "unasked": SkipReason.NO_QUERY,
        "empty": None,
        "shown": None,
    }
    assert found["failed"].skip_detail == "it broke"
    assert found["silent"].skip_detail == "the agent's span has no output (gen_ai.output.messages)"
    assert found["shown"].images == ("https://x/y.png",)


def test_an_agent_called_without_a_message_answers_what_it_observed(tmp_path: Path) -> None:
    found = extracted(tmp_path, chat("c", ASKED, "2", parent="a"), agent("a", asked=None, ended=2))
    assert (found["a"].query, found["a"].skip) == ("What is 1 + 1?", None)
    assert found["a"].history == ({"role": "system", "content": "s"},)


def test_the_version_that_served_the_reply(tmp_path: Path) -> None:
    found = extracted(
        tmp_path,
        chat("c", ASKED, "2", served="my-agent@r0007", parent="a"),
        agent("a", ended=2),
    )
    assert (found["a"].model, found["a"].adapter) == ("small", "my-agent@r0007")


def test_what_the_model_was_given_besides_the_request_is_history(tmp_path: Path) -> None:
    hint = message("user", part("<long_term_memory>1 + 1 is 2</long_term_memory>"))
    found = extracted(tmp_path, chat("c", [*ASKED, hint], "2", parent="a"), agent("a", ended=2))
    assert [m["content"] for m in found["a"].history] == ["s", "<long_term_memory>1 + 1 is 2</long_term_memory>"]
    assert found["a"].turn == 0
