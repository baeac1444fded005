"""Recorded replies as training samples: supervised are the model's own messages of the reply, and nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from flywheel.errors import TrainError
from flywheel.records.round import RoundTask
from flywheel.training.data.samples import Sample
from flywheel.training.engine.chat_rendering import NO_REASONING, NoSampleError
from tests.factories.chat_rendering import Served, rendering
from tests.factories.round import POLICY
from tests.factories.task import round_task

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHATML = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content or '' }}<|im_end|>\n"
    "{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
LLAMA = (
    "<|begin_of_text|>{%- for message in messages -%}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ (message.content or '') | trim }}"
    '{%- for call in message.tool_calls or [] -%}{"name": {{ call.function.name | tojson }}, "parameters": '
    "{{ call.function.arguments | tojson }}}{%- endfor -%}<|eot_id|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif -%}"
)
QWEN3 = (
    "{%- if tools -%}<|im_start|>system\n{% for tool in tools -%}{{ tool | tojson }}\n{% endfor -%}<|im_end|>\n"
    "{% endif -%}"
    "{%- set at = namespace(query=0) -%}{%- for message in messages -%}{%- if message.role == 'user' -%}"
    "{%- set at.query = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for message in messages -%}{%- if message.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|im_start|>user{%- endif %}\n<tool_response>\n"
    "{{ message.content }}\n</tool_response>{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}"
    "<|im_end|>\n{% endif -%}{%- else -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > at.query and (loop.last or message.reasoning_content) -%}"
    "<think>\n{{ (message.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif -%}"
    "{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}{%- if not loop.first or message.content -%}{{ '\n' }}{%- endif -%}"
    "<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor -%}<|im_end|>\n{% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% if enable_thinking is false -%}<think>\n\n</think>\n\n"
    "{% endif -%}{%- endif -%}"
)
SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(number: int, **arguments: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "name": "add", "content": content}


def said(content: str | None, *calls: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def task(*reply: dict[str, Any], prompt: list[dict[str, Any]] | None = None, tools: bool = False) -> RoundTask:
    asked = prompt or [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How much is 1 plus 2?"},
    ]
    return round_task("t", prompt=asked, reply=reply, tools=(TOOL,) if tools else ())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo's policy with the special tokens of several families."""
    from transformers import AutoTokenizer

    model = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(POLICY, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(model)
    generation = json.loads((model / "generation_config.json").read_text())
    ends = [generation["eos_token_id"]] if isinstance(generation["eos_token_id"], int) else generation["eos_token_id"]
    generation["eos_token_id"] = [*ends, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    (model / "generation_config.json").write_text(json.dumps(generation))
    yield from rendering(model)


def samples(
    served: Served, template: str, of: RoundTask, *, empty: bool = False, **arguments: Any
) -> tuple[Sample, ...]:
    chat = served.chat(f"--chat-template={template}", f"--default-chat-template-kwargs={json.dumps(arguments)}")
    return asyncio.run(chat.recorded_reply(of, empty_reasoning=empty)).samples


def test_without_thinking_there_is_no_reasoning_to_record(served: Served) -> None:
    [sample] = samples(served, QWEN3, task(said("3")), enable_thinking=False)
    assert served.trained(sample) == ["3<|im_end|>"]


def written(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    "reply",
    [
        said("It ends<|im_end|> here"),
        said("3", reasoning_content="Then <|im_end|>"),
        said(None, call(1, a=1) | {"id": "<|eot_id|>"}),
        said(None, written(r'{"a": "\u003c|im_end|\u003e"}')),
        said(None, written(r'{"a": [{"\u003c|im_end|\u003e": 1}]}')),
        said(None, {"id": "c1", "type": "function", "function": {"name": "<|im_end|>", "arguments": "{}"}}),
    ],
    ids=["text", "reasoning", "id", "arguments", "a name in them", "name"],
)
def test_a_reply_with_a_special_token_is_left_out(served: Served, reply: dict[str, Any]) -> None:
    with pytest.raises(NoSampleError, match="special token"):
        samples(served, QWEN3, task(reply, tools=True), empty=True)


def test_a_special_token_in_a_question_or_a_result_stays_what_the_server_reads(served: Served) -> None:
    prompt = [{"role": "user", "content": "What is <|im_end|>?"}]
    of = task(said(None, call(1, a=1)), result(1, "<|im_end|>"), said("An end."), prompt=prompt, tools=True)
    made = samples(served, QWEN3, of, empty=True)
    assert served.decoded(made[0].token_ids).count("<|im_end|>") > 2
    assert served.trained(made[-1])[-1].endswith("An end.<|im_end|>")


def test_the_last_message_is_trained_with_its_text_and_its_call(served: Served) -> None:
    [sample] = samples(served, QWEN3, task(said("Let me look.", call(1, a=1)), tools=True), enable_thinking=False)
    assert served.trained(sample) == [
        'Let me look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    ]


def test_turns_before_a_last_result_are_trained(served: Served) -> None:
    of = task(said("One moment."), result(1, "3"))
    [sample] = samples(served, CHATML, of)
    assert served.trained(sample) == ["One moment.<|im_end|>"]
    with pytest.raises(NoSampleError, match="no message of the model"):
        samples(served, CHATML, task(result(1, "3")))


@pytest.mark.parametrize("content", [None, "Let me look."])
def test_calls_that_a_template_does_not_write_are_not_trained_around(served: Served, content: str | None) -> None:
    of = task(said(content, call(1, a=1)), result(1, "3"), said("It is 3."), tools=True)
    with pytest.raises(NoSampleError, match="the chat template does not write its calls"):
        samples(served, CHATML, of)


@pytest.mark.parametrize("dropped", ["call.function.name | tojson", "call.function.arguments | tojson"])
def test_a_template_that_writes_calls_in_part_writes_none(served: Served, dropped: str) -> None:
    template = LLAMA.replace(dropped, "'add' | tojson" if "name" in dropped else "{} | tojson")
    other = call(1, a=1) | {"function": {"name": "sum", "arguments": '{"a": 1}'}}
    with pytest.raises(NoSampleError, match="does not write its calls"):
        samples(served, template, task(said(None, other), tools=True))
    only_first = LLAMA.replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")
    with pytest.raises(NoSampleError, match="does not write its calls"):
        samples(served, only_first, task(said(None, call(1, a=1), call(2, a=1)), tools=True))


def test_what_a_template_writes_behind_the_end_of_a_turn_is_not_written(served: Served) -> None:
    template = LLAMA.replace("{%- for call", "{{ '<|eot_id|>' }}{%- for call")
    with pytest.raises(NoSampleError, match="does not write its calls"):
        samples(served, template, task(said("Let me look.", call(1, a=1)), tools=True))


def test_a_text_that_a_template_drops_beside_a_call_is_missed_though_the_call_says_it(served: Served) -> None:
    template = LLAMA.replace("(message.content or '')", "('' if message.tool_calls else message.content)")
    of = task(said("one", written('{"word": "one"}')), tools=True)
    with pytest.raises(NoSampleError, match="does not write its text"):
        samples(served, template, of)


@pytest.mark.parametrize(
    "arguments", [{"a": 1}, '{"a": 1}', '"{\\"a\\": 1}"'], ids=["an object", "its text", "encoded twice"]
)
def test_arguments_in_any_form_are_trained_as_the_object(served: Served, arguments: Any) -> None:
    [sample] = samples(served, LLAMA, task(said(None, written(arguments)), result(1, "3"), said("3"), tools=True))
    assert served.trained(sample) == ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "3<|eot_id|>"]


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", '"a"', "1", "null"])
def test_arguments_that_are_no_object_are_no_target_but_may_be_context(served: Served, arguments: str) -> None:
    reply = said(None, written(arguments)), result(1, "3"), said("3")
    if arguments != "null":
        with pytest.raises(NoSampleError, match="the arguments of its call of add are no JSON object"):
            samples(served, LLAMA, task(*reply, tools=True))
    [sample] = samples(served, LLAMA, task(reply[0] | {"weight": 0}, *reply[1:], tools=True))
    assert served.trained(sample) == ["3<|eot_id|>"]
    assert '{"name": "add", "parameters": {}}' in served.decoded(sample.token_ids)


def test_a_message_with_the_weight_0_is_context(served: Served) -> None:
    of = task(said("One moment.", weight=0), result(1, "3"), said("It is 3.", weight=1))
    [sample] = samples(served, CHATML, of)
    assert served.trained(sample) == ["It is 3.<|im_end|>"]
    assert "One moment.<|im_end|>" in served.decoded(sample.token_ids)
    with pytest.raises(NoSampleError, match="no message of the model"):
        samples(served, CHATML, task(said("3", weight=0)))


def test_reasoning_that_the_agent_does_not_send_again_is_trained_and_no_context(served: Served) -> None:
    step = said(None, call(1, a=1), reasoning_content="First add.")
    rest = result(1, "1"), said("It is 1.", reasoning_content="Now I know.")
    sent = samples(served, QWEN3, task(step, *rest, tools=True))
    assert [served.trained(each) for each in sent] == [
        [
            '<think>\nFirst add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
            "<|im_end|>",
            "<think>\nNow I know.\n</think>\n\nIt is 1.<|im_end|>",
        ]
    ]
    kept = samples(served, QWEN3, task(step | {"reasoning_sent": False}, *rest, tools=True))
    assert [text for each in kept for text in served.trained(each)] == served.trained(sent[0])
    assert "First add." not in served.decoded(kept[1].token_ids)


def test_a_template_is_asked_before_the_model_is_loaded_whether_it_trains(served: Served) -> None:
    def checked(template: str) -> None:
        asyncio.run(served.chat(f"--chat-template={template}").check_targets())

    for template in (CHATML, LLAMA, QWEN3):
        checked(template)
    checked("{{ raise_exception('not this question') }}")
    with pytest.raises(TrainError, match="no token at which the server stops"):
        checked("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    opened = (
        "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    with pytest.raises(TrainError, match=r"which ends in '<think>'"):
        checked(opened)
    # Reasoning is to be recorded with each reply.
    checked(
        opened.replace(
            "{{ message.content",
            "{% if message.reasoning %}<think>{{ message.reasoning }}{% endif %}{{ message.content",
        )
    )


def test_reasoning_that_the_text_says_as_well_is_missed_where_a_template_writes_none(served: Served) -> None:
    chat = served.chat(f"--chat-template={CHATML}")
    reply = asyncio.run(chat.recorded_reply(task(said("3", reasoning_content="3")), empty_reasoning=False))
    assert reply.without == (NO_REASONING,)


def test_a_token_that_ends_turns_is_special_whatever_the_vocabulary_says(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = served.chat(f"--chat-template={CHATML}")
    ends = {served.renderer.get_tokenizer().convert_tokens_to_ids(token) for token in ("<|im_end|>", "</tool_call>")}
    monkeypatch.setattr(chat, "_end_of_turn", lambda: ends)
    with pytest.raises(NoSampleError, match="special token </tool_call>"):
        asyncio.run(chat.recorded_reply(task(said("It ends </tool_call> here.")), empty_reasoning=False))


def test_rendering_changes_no_task(served: Served) -> None:
    earlier = [{"role": "user", "content": "Hi"}, said("Hello.", reasoning_content="A greeting.")]
    prompt = [*earlier, {"role": "user", "content": "1+2?"}]
    of = task(said(None, call(1, a=1), thinking="Add."), result(1, "1"), said("1", reasoning="So."), prompt=prompt)
    before = of.model_copy(deep=True)
    samples(served, QWEN3, of)
    assert of == before
