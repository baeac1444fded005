"""Whether a prompt is exactly what the model was sent, and which version of the alias answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flywheel.records import exclusion
from flywheel.records.exclusion import Exclusion, TrainedModels
from flywheel.records.request_id import BASE_VERSION, new_request_id
from flywheel.records.task import entry_of
from flywheel.records.trace import Reply, ReplySelection
from tests.sources.studio.reading import FIXTURE, OURS, extracted, line_of, replies
from tests.sources.studio.writer import DATA, agent, chat, message, part

SENT = [message("system", part("s")), message("user", part("What is 1 + 1?"))]
HIDDEN = message("assistant")
"""How AgentScope's tracer records a message that holds nothing but a hint."""


def labels() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "dialogues" / f"{FIXTURE}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("label", labels(), ids=lambda label: label["span_id"])
def test_the_reminder_that_the_tracer_hides_is_noticed(label: dict[str, Any]) -> None:
    reply = replies(FIXTURE)[label["span_id"]]
    assert (reply.query, reply.answer) == (label["query"], label["answer"])
    assert (reply.skip is not None) == label["error"]
    about = line_of(reply)["metadata"]
    assert about["prompt_exact"] == (not label["runtime_reminder"])
    assert about["prompt_reason"] == (exclusion.HIDDEN_MESSAGE if label["runtime_reminder"] else "")
    assert about["prompt_source"] == "trace"
    if label["error"]:
        return
    excluded = set(exclusion.parsed(entry_of(reply, "/a", OURS).excluded))
    assert (Exclusion.HIDDEN in excluded) == label["runtime_reminder"]
    assert (Exclusion.TOOLS in excluded) == bool(label["tools_called"])
    assert (Exclusion.MODEL in excluded) == (label["model"] != "my-agent")


def test_the_tokens_of_the_first_model_call_are_kept_apart_from_the_sum() -> None:
    for label in labels():
        reply = replies(FIXTURE)[label["span_id"]]
        if label["tools_called"]:
            assert (reply.prompt_tokens, reply.input_tokens) == (50, 100)
        elif not label["error"]:
            assert reply.prompt_tokens == reply.input_tokens
            assert (reply.prompt_tokens > 200) == label["runtime_reminder"]
    assert line_of(reply)["metadata"]["prompt_tokens"] == reply.prompt_tokens


def test_clients_that_record_no_input_of_the_model_have_no_exact_prompt() -> None:
    told = [reply for reply in replies("client_2_0_4").values() if reply.skip is None]
    assert {reply.prompt_reason for reply in told} == {exclusion.NOT_RECORDED}


@pytest.mark.parametrize("name", ["new_v1", "agentscope_2_0_10"])
def test_an_exact_prompt_is_what_the_model_call_records(name: str) -> None:
    exact = [reply for reply in replies(name).values() if not reply.skip and not reply.prompt_reason]
    assert len(exact) >= 20
    for reply in exact:
        assert line_of(reply)["prompt"][-1] == {"role": "user", "content": reply.query}
        assert line_of(reply)["prompt"][0]["role"] == "system"


def told(path: Path, *spans: dict[str, Any], models: TrainedModels = OURS) -> Reply:
    return extracted(path, *spans, selection=ReplySelection(models=models))["a"]


PICTURE = {"type": "uri", "uri": "https://x/y.png", "modality": "image"}
FINISH = {"type": "function", "name": "generate_response", "parameters": {}}
GAPS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "nothing": (SENT, {}, ""),
    "an empty text is no hidden message": ([SENT[0], message("user", part("")), SENT[1]], {}, ""),
    "a hidden message": ([*SENT, HIDDEN], {}, exclusion.HIDDEN_MESSAGE),
    "a hidden message before": ([SENT[0], SENT[1], HIDDEN, SENT[1]], {}, exclusion.HIDDEN_MESSAGE),
    "no input": ([], {}, exclusion.NOT_RECORDED),
    "knowledge behind the question": ([*SENT, message("user", part("1 is odd"))], {}, exclusion.OTHER_PROMPT),
    "a question of another role": ([SENT[0], message("assistant", *SENT[1]["parts"])], {}, exclusion.OTHER_PROMPT),
    "an image in an earlier turn": (
        [SENT[0], message("user", part("Look"), PICTURE), message("assistant", part("I see")), SENT[1]],
        {},
        exclusion.IMAGE,
    ),
    "a function to answer with": (SENT, {"tool": {"definitions": [FINISH]}}, exclusion.FINISH_FUNCTION),
}


@pytest.mark.parametrize("gap", GAPS)
def test_what_a_prompt_lacks_is_said(tmp_path: Path, gap: str) -> None:
    given, more, reason = GAPS[gap]
    row = chat("c", given, "2", parent="a")
    attributes = json.loads(row["attributes"])
    attributes["gen_ai"] |= more
    row["attributes"] = json.dumps(attributes)
    reply = told(tmp_path, row, agent("a", ended=2))
    assert reply.prompt_reason == reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("extra_body", {"chat_template_kwargs": {"enable_thinking": False}}, exclusion.TEMPLATE_PARAMETERS),
        ("chat_template_kwargs", {"enable_thinking": True}, exclusion.TEMPLATE_PARAMETERS),
        ("reasoning_effort", "high", exclusion.TEMPLATE_PARAMETERS),
        ("extra_body", {"top_k": 5}, ""),
        ("temperature", 0.5, ""),
    ],
)
def test_parameters_of_the_chat_template_are_noticed(tmp_path: Path, name: str, value: Any, reason: str) -> None:
    row = chat("c", SENT, "2", parent="a")
    attributes = json.loads(row["attributes"])
    attributes["agentscope"] = {"function": {"input": {"args": [], "kwargs": {name: value}}}}
    row["attributes"] = json.dumps(attributes)
    assert told(tmp_path, row, agent("a", ended=2)).prompt_reason == reason


def test_a_question_with_an_image_has_no_exact_prompt(tmp_path: Path) -> None:
    asked = [message("user", part("What is it?"), PICTURE)]
    reply = told(tmp_path, chat("c", [SENT[0], *asked], "A cat.", parent="a"), agent("a", asked=asked, ended=2))
    about = line_of(reply)["metadata"]
    assert (about["prompt_exact"], about["prompt_reason"]) == (False, exclusion.IMAGE)
    assert entry_of(reply, "/a").excluded == Exclusion.IMAGE


def answered(span_id: str, *, asked: str = "my-agent", response: dict[str, Any], **more: Any) -> dict[str, Any]:
    row = chat(span_id, SENT, "2", parent="a", **more)
    attributes = json.loads(row["attributes"])
    attributes["gen_ai"] |= {"request": {"model": asked}, "response": response}
    return row | {"attributes": json.dumps(attributes)}


MARKED = f"chatcmpl-{new_request_id('0' * 16, 'my-agent@r0007')}"
ANSWERS: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "the id": ("my-agent", {"id": MARKED}, ("my-agent@r0007", "id")),
    "the id before the model": ("my-agent", {"id": MARKED, "model": "my-agent@r0001"}, ("my-agent@r0007", "id")),
    "the id whatever was asked": ("through-a-gateway", {"id": MARKED}, ("my-agent@r0007", "id")),
    "the id of the base model": (
        "my-agent",
        {"id": f"chatcmpl-{new_request_id('0' * 16, BASE_VERSION)}", "model": "my-agent@r0001"},
        ("", "id"),
    ),
    "the model": ("my-agent", {"id": "chatcmpl-1", "model": "my-agent@r0001"}, ("my-agent@r0001", "model")),
    "the base model's name": ("my-agent", {"model": "/models/base"}, ("", "model")),
    "a version that was asked for": ("my-agent@r0003", {}, ("my-agent@r0003", "model")),
    "nothing": ("my-agent", {"id": "chatcmpl-94e93c66350711dd"}, ("", "")),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_where_the_version_that_answered_is_recorded(tmp_path: Path, what: str) -> None:
    asked, response, expected = ANSWERS[what]
    reply = told(tmp_path, answered("c", asked=asked, response=response), agent("a", ended=2))
    assert (reply.adapter, reply.adapter_source) == expected
    about = line_of(reply)["metadata"]
    assert (about["adapter"], about["adapter_source"]) == expected
    entry = entry_of(reply, "/a", OURS)
    assert entry.excluded == ""
    assert entry.asked_alias == ("my-agent" if what == "nothing" else "")


def test_the_last_call_of_a_reply_says_which_version_answered(tmp_path: Path) -> None:
    earlier = f"chatcmpl-{new_request_id('0' * 16, 'my-agent@r0006')}"
    reply = told(
        tmp_path,
        answered("c0", response={"id": earlier}, began=0, ended=1),
        answered("c1", response={"id": MARKED}, began=1, ended=2),
        agent("a", ended=3),
    )
    assert (reply.adapter, reply.adapter_source) == ("my-agent@r0007", "id")


def test_the_model_that_answered_after_another_failed_counts(tmp_path: Path) -> None:
    failed = answered("c0", response={}, began=0, ended=1, code=2, message="overloaded")
    attributes = json.loads(failed["attributes"])
    del attributes["gen_ai"]["output"]
    failed["attributes"] = json.dumps(attributes)
    reply = told(
        tmp_path, failed, answered("c1", asked="fallback", response={}, began=1, ended=2), agent("a", ended=3)
    )
    assert reply.model == "fallback"
    assert entry_of(reply, "/a", OURS).excluded == Exclusion.MODEL
