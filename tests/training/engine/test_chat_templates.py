"""Genuine chat templates: a sample is what the template writes of the conversation, or there is none with the reason.

What a template writes is asked from transformers here, with neither vLLM's nor Flywheel's conversion of messages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flywheel.errors import TrainError
from flywheel.records.round import RoundTask
from flywheel.sources.jsonl.record import rows_of
from flywheel.training.engine.chat_rendering import NO_REASONING, NoSampleError
from flywheel.training.engine.engine import Engine
from scripts.template_table import UNTHOUGHT, documented, outcome
from tests.factories.chat_rendering import SETTINGS, Served, rendering
from tests.factories.chat_templates import (
    FAMILIES,
    SHAPES,
    asked,
    call,
    recorded,
    result,
    said,
    served_with,
    template_of,
)
from tests.factories.round import POLICY

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REASONING = ("reasoning", "reasoning_content", "thinking")


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served_with(family, tmp_path_factory.mktemp("model"))


def rendered(served: Served, family: str, task: RoundTask, messages: list[dict[str, Any]], **more: Any) -> str:
    """What the template of the family writes, asked from transformers."""
    tools, template = list(task.exchange.tools) or None, template_of(family)
    tokenizer = served.renderer.get_tokenizer()
    return str(tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, **more))


def divided(message: dict[str, Any]) -> tuple[str, str]:
    """The reasoning and the text of a message."""
    text = message.get("content") or ""
    said = next((message[key] for key in REASONING if (message.get(key) or "").strip()), "")
    if not said and (tagged := re.match(r"\s*<think>(.*?)</think>(.*)\Z", text, re.DOTALL)):
        return tagged[1].strip(), tagged[2].lstrip()
    return said, text


def plain(message: dict[str, Any], text: str, said: str = "", keys: tuple[str, ...] = REASONING) -> dict[str, Any]:
    """A message as templates read it, with its reasoning under these keys."""
    made = {key: value for key, value in message.items() if key not in REASONING} | {"content": text}
    if message.get("tool_calls"):
        made["tool_calls"] = [
            {**each, "function": {**each["function"], "arguments": parsed(each["function"]["arguments"])}}
            for each in message["tool_calls"]
        ]
    return made | dict.fromkeys(keys, said) if said.strip() else made


def parsed(arguments: Any) -> Any:
    while isinstance(arguments, str):
        arguments = json.loads(arguments)
    return arguments


def check(served: Served, family: str, task: RoundTask) -> None:
    """The samples of a task are what the template writes, and miss nothing that is not told."""
    reply = recorded(served, task, empty=True)
    runs = [(sample, run) for sample in reply.samples for run in served.trained(sample)]
    places = [place for place, message in enumerate(task.reply) if message["role"] == "assistant"]
    assert len(runs) == len(places)
    for (sample, run), place in zip(runs, places, strict=True):
        before = [
            # What vLLM passes on to a template.
            plain(
                each,
                each.get("content") or "",
                next((each[key] for key in REASONING if each.get(key)), ""),
                REASONING[:2],
            )
            for each in (*task.prompt, *task.reply[:place])
        ]
        prompt = rendered(served, family, task, before, add_generation_prompt=True)
        message = task.reply[place]
        said, text = divided(message)
        forms = [plain(message, text, said), plain(message, message.get("content") or ""), plain(message, text)]
        found = []
        for form in forms:
            whole = rendered(served, family, task, [*before, form])
            ends = [at + len(end) for end in FAMILIES[family].ends if (at := whole.find(end, len(prompt))) >= 0]
            found += [whole[: min(ends)]] if whole.startswith(prompt) and ends else []
        assert prompt + run in found
        assert prompt + run in served.decoded(sample.token_ids)
        assert text.strip() in run
        assert said.strip() in run or reply.without == (NO_REASONING,)
        values = [text, said]
        for each in message.get("tool_calls") or ():
            assert each["function"]["name"] in run
            values.append(json.dumps(parsed(each["function"]["arguments"]), ensure_ascii=False))
        special = [
            str(token) for token in served.renderer.get_tokenizer().added_tokens_decoder.values() if token.special
        ]
        assert [token for token in special for value in values if token in value] == []


@pytest.mark.parametrize("shape", [*SHAPES, UNTHOUGHT])
def test_a_sample_is_what_the_template_writes_or_there_is_none(served: Served, family: str, shape: str) -> None:
    found = outcome(served, shape)
    assert found == documented()[family][shape], "run: python -m scripts.template_table"
    if found in ("yes", "in part") and shape != UNTHOUGHT:
        check(served, family, asked(*SHAPES[shape]))


HARD = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "Rain.",
        "<think>",
        "</think>",
        "{}",
        '"',
        "\\",
        "null",
        "get_weather",
        "Oslo",
        "[/INST]",
        "é",
        "\U0001f327",
        "'",
    ]
)
TEXT = st.lists(
    HARD | st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), max_size=8), max_size=5
).map("".join)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def _cut(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments)[:-1]


@st.composite
def replies(draw: st.DrawFn) -> tuple[dict[str, Any], ...]:
    messages = []
    for _ in range(draw(st.integers(1, 2))):
        thought = {draw(st.sampled_from(REASONING)): draw(TEXT)} if draw(st.booleans()) else {}
        given = draw(st.lists(st.dictionaries(TEXT.filter(str.strip), JSON, max_size=3), max_size=2))
        # An object, its text, that text encoded again, and a text that breaks off.
        encode = st.sampled_from((dict, json.dumps, json.dumps, lambda each: json.dumps(json.dumps(each)), _cut))
        forms = [draw(encode)(arguments) for arguments in given]
        messages.append(said(draw(TEXT | st.none()), *(call(each, n) for n, each in enumerate(forms)), **thought))
        messages += [result(draw(TEXT), number) for number in range(len(given))]
        if not given:
            break
    return tuple(messages)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(reply=replies())
def test_no_conversation_trains_anything_else(served: Served, family: str, reply: tuple[dict[str, Any], ...]) -> None:
    try:
        recorded(served, asked(*reply), empty=True)
    except NoSampleError:
        return
    except Exception as error:
        assert "VLLM" in type(error).__name__
        return
    check(served, family, asked(*reply))


def test_a_call_without_arguments_is_no_token_that_is_trained(served: Served, family: str) -> None:
    turns = [
        {"role": "user", "content": "How is the weather in Oslo?"},
        {"role": "assistant", "content": "I call get_weather."},
        {"role": "tool", "tool_id": "get_weather", "content": "Done.", "result": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]
    [row] = rows_of([json.dumps({"turns": turns}).encode()], Path("dialogs.jsonl"), "read the dialogs")
    assert row.reply[0]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    try:
        samples = recorded(served, asked(*row.reply), empty=True).samples
    except Exception:  # a template that takes no tools, or writes no answer behind a text and its call
        assert family not in ("qwen2_5", "qwen3", "qwen3_5_nothink", "llama3_1")
        return
    [run] = [run for sample in samples for run in served.trained(sample)]
    assert ("Rain." in run, "get_weather" in run, "call" in run) == (True, False, False)


MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo's policy with Mistral's first vocabulary, in the form in which it was published for transformers."""
    import mistral_common
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    model = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(POLICY, model)
    source = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    extracted = SentencePieceExtractor(str(source)).extract(None)
    vocabulary, merges = extracted["vocab"], extracted["merges"]
    if not isinstance(vocabulary, dict):
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(each, normalized=False, special=True) for each in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(about))
    (model / "chat_template.jinja").write_text(MISTRAL)
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 2}))
    yield from rendering(model)


def test_an_answer_behind_a_prompt_has_the_tokens_of_the_whole_text(sentencepiece: Served) -> None:
    task = asked(said("Yellow flowers."))
    [sample] = recorded(sentencepiece, task).samples
    tokenizer = sentencepiece.renderer.get_tokenizer()
    whole = tokenizer.encode(
        f"<s>[INST] {task.prompt[0]['content']} [/INST] Yellow flowers.</s>", add_special_tokens=False
    )
    own = [token for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained]
    assert (list(sample.token_ids), tokenizer.convert_ids_to_tokens(own)[0]) == (whole, "▁Yellow")


@pytest.mark.parametrize("family", ["glm4moe", "qwen2_5"], scope="module", indirect=True)
async def test_a_hopeless_template_is_named_before_the_model_is_loaded(
    served: Served, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("the model would be loaded")

    monkeypatch.setattr(AsyncLLM, "from_vllm_config", load)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    model = served.model_config.model
    engine = Engine(dataclasses.replace(SETTINGS, model=model, server=("--max-model-len", "64"), imitates=True))
    expected = "no token at which the server stops" if family == "glm4moe" else "the model would be loaded"
    with pytest.raises(TrainError, match=expected):
        await engine.start()
