"""Prompts are those that the server makes: by vLLM's own code, and compared with a real server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from flywheel.config.file import Config
from flywheel.errors import TrainError
from flywheel.records.round import RoundSpec, RoundTask
from flywheel.training.data.rollout import Completion, RolloutRequest
from flywheel.training.engine.chat_rendering import ChatFormat, ParsedAnswer, ServedChat, served_format
from flywheel.training.engine.engine import Engine
from flywheel.training.worker.processes import chat_of
from tests.conftest import VllmServer
from tests.factories.chat_rendering import SETTINGS, Served, rendering
from tests.factories.round import POLICY
from tests.factories.task import round_task

pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATE = """\
{%- for tool in tools or [] %}{{ '<tool>' + (tool | tojson) }}{%- endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<call>' }}
{%- for name, value in call.function.arguments | items %}{{ name + '=' + (value | tojson) + ';' }}{%- endfor %}
{%- if call.function.name == 'break' %}{{ 1 // 0 }}{%- endif %}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('' if thinking else '<no thought>') }}{%- endif %}"""

SEARCH = {"function": {"parameters": {"type": "object"}, "name": "search", "strict": True}, "type": "function"}


def called(name: str, arguments: str) -> list[dict[str, Any]]:
    """A dialogue in which a tool was called before."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße, 你好 👋"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": name, "content": "nothing"},
        {"role": "assistant", "content": "I found nothing."},
        {"role": "user", "content": "And now?"},
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo's policy, with a template like those of models that call tools."""
    model = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(POLICY, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    yield from rendering(model)


@pytest.fixture(scope="module")
def served_with_thoughts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model with the tokens that the parsers of thoughts and calls look for."""
    from transformers import AutoTokenizer

    model = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(POLICY, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(model)
    yield from rendering(model)


def encoded(
    served: Served, tasks: list[RoundTask], chat: ChatFormat | None = None
) -> tuple[list[str], dict[str, str]]:
    """Prompts as text, and what was refused; only vLLM's engine is left out."""
    engine = Engine(SETTINGS)
    engine._chat = served.chat(chat)
    prompts, refused = asyncio.run(engine.encode(tasks))
    return [served.decoded(prompt.token_ids) for prompt in prompts], refused


@pytest.mark.slow
def test_the_text_of_tokens_adds_up_and_breaks_no_character(served: Served) -> None:
    class Bytes:
        """A tokenizer with a token for each byte, like byte-level ones where they know no longer token."""

        def decode(self, token_ids: Sequence[int]) -> str:
            return bytes(token_ids).decode(errors="replace")

        def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
            return [chr(0x100 + token) for token in token_ids]

        def get_tokenizer(self) -> Bytes:
            return self

    chat = served.chat()
    tokens = served.renderer.get_tokenizer().encode("What is 3 plus 4?<|im_end|>")
    assert "".join(chat.texts(tokens)) == served.decoded(tokens)
    assert len(chat.texts(tokens)) == len(tokens) > 1
    chat = served.chat()
    chat._renderer = Bytes()
    text = "a\n你好 👋!"
    assert chat.texts(list(text.encode())) == (
        "a", "\n", "", "", "你", "", "", "好", " ", "", "", "", "👋", "!",
    )  # fmt: skip
    # What is no character stays so, and is not waited for.
    assert chat.texts([0xFF] * 20 + [0x41]) == (*["\N{REPLACEMENT CHARACTER}"] * 20, "A")


def asked(name: str, prompt: list[dict[str, Any]], tools: list[dict[str, Any]]) -> RoundTask:
    return round_task(name, "And now?", reference="", prompt=prompt, tools=tuple(tools))


@pytest.mark.slow
def test_earlier_calls_and_tools_are_rendered_as_the_server_renders_them(served: Served) -> None:
    """The arguments are JSON text in a trace and a mapping in a template; tools have one order of keys."""
    some = asked("t-1", called("search", '{"q":"é","n":1}'), [SEARCH])
    before = some.model_copy(deep=True)
    [text], refused = encoded(served, [some])
    assert refused == {}
    assert text == (
        '<tool>{"type": "function", "function": {"name": "search", "description": null, "parameters": '
        '{"type": "object"}, "strict": true}}'
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße, 你好 👋<|im_end|>\n"
        '<|im_start|>assistant\n<call>q="é";n=1;<|im_end|>\n<|im_start|>tool\nnothing<|im_end|>\n'
        "<|im_start|>assistant\nI found nothing.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n<no thought>"
    )
    assert some == before


@pytest.mark.slow
def test_a_template_that_leaves_tools_out_ends_the_round(served: Served) -> None:
    """Tasks without tools do not tell, and neither does the user's agent, which has tools of its own."""
    blind = TEMPLATE[TEMPLATE.index("{%- endfor %}") + len("{%- endfor %}") :]
    some = [asked(f"t-{place}", called("search", "{}"), [SEARCH]) for place in range(2)]
    chat = ChatFormat(template=blind)
    with pytest.raises(TrainError, match=r"tools of 2 tasks.*the same prompt.*--chat-template"):
        encoded(served, [round_task("t-plain"), *some], chat)
    without = [round_task("t-plain"), some[0].model_copy(update={"agent": "program"})]
    texts, refused = encoded(served, without, chat)
    assert (len(texts), refused) == (2, {})
    texts, refused = encoded(served, [round_task("t-plain"), *some])
    assert (len(texts), refused) == (3, {})


@pytest.mark.slow
def test_a_task_on_which_the_template_breaks_costs_itself_alone(served: Served) -> None:
    broken = asked("t-broken", called("break", "{}"), [])
    texts, refused = encoded(served, [round_task("t-1"), broken, round_task("t-2")])
    assert len(texts) == 2
    assert list(refused) == ["t-broken"]


@pytest.mark.slow
def test_what_the_server_is_told_of_templates_counts(served: Served, tmp_path: Path) -> None:
    chat = served_format(["--dtype", "float32", "--default-chat-template-kwargs", '{"thinking": true}'])
    [text], _ = encoded(served, [round_task()], chat)
    assert text.endswith("<|im_start|>assistant\n")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[-1].content }}!")
    [text], _ = encoded(served, [round_task()], served_format([f"--chat_template={other}"]))
    assert text == "What is 3 plus 4?!"
    with pytest.raises(TrainError, match=r"cannot read the chat template /nowhere\.jinja"):
        encoded(served, [round_task()], served_format(["--chat-template", "/nowhere.jinja"]))


def test_arguments_of_the_server_that_cannot_be_read_are_told() -> None:
    assert served_format([]) == ChatFormat()
    for wrong in ("{thinking}", "[1]"):
        with pytest.raises(TrainError, match=r"--default-chat-template-kwargs.*serving\.extra_args"):
            served_format(["--default-chat-template-kwargs", wrong])


THOUGHT = "<think>\n3 and 4 make 7.\n</think>\n\nIt is 7."
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "7"}}\n</tool_call>'
PARSERS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"]


def handed_on(chat: ServedChat, some: RoundTask, text: str) -> ParsedAnswer:
    tokens = chat._renderer.get_tokenizer().encode(text, add_special_tokens=False)
    return chat.answer(some, asyncio.run(chat.encode(some)), text, tokens)


@pytest.mark.slow
def test_answers_are_what_the_servers_parsers_leave_of_them(served_with_thoughts: Served) -> None:
    offered = asked("t-1", called("search", "{}"), [SEARCH])
    without = served_with_thoughts.chat(served_format([]))
    assert handed_on(without, offered, THOUGHT) == ParsedAnswer(THOUGHT)
    chat = served_with_thoughts.chat(served_format(PARSERS))
    assert handed_on(chat, round_task(), THOUGHT).text.strip() == "It is 7."
    assert handed_on(chat, round_task(), "<think>\n3 and 4 and") == ParsedAnswer(""), "it has not begun to answer"
    assert handed_on(chat, offered, f"<think>\nI search.\n</think>\n{CALL}").tools == ("search",)
    # An agent that offered no tools gets the text of a call as its answer.
    assert handed_on(chat, round_task(), f"<think></think>{CALL}").text.strip() == CALL
    assert handed_on(chat, round_task(), f"<think></think>{CALL}").tools == ()


class Written:
    """Takes the place of vLLM's engine: it generates this text, and then ends, or goes on for ever."""

    def __init__(self, text: str, ids: list[int], *, ends: bool = True) -> None:
        self.output = SimpleNamespace(
            text=text, token_ids=ids, finish_reason="stop" if ends else None,
            logprobs=[{token: SimpleNamespace(logprob=-0.5, decoded_token="")} for token in ids],
        )  # fmt: skip
        self.ends = ends

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[self.output])
        if not self.ends:
            await asyncio.Event().wait()


def completed(served: Served, some: RoundTask, text: str, **values: Any) -> Completion:
    engine = Engine(SETTINGS)
    engine._chat = served.chat(served_format(PARSERS))
    ids = served.renderer.get_tokenizer().encode(text, add_special_tokens=False)
    engine._llm = Written(text, ids, ends=values.get("seconds") is None)
    [prompt], _ = asyncio.run(engine.encode([some]))
    return asyncio.run(engine.generate(RolloutRequest(prompt, 0, 7, 1.0, 64, None, **values)))


@pytest.mark.slow
def test_a_rollout_that_calls_a_tool_has_no_reward_rather_than_zero(
    served_with_thoughts: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tool runs in a rollout, so there is no answer to grade."""

    async def not_checked(*_: Any) -> None:
        """The template of this model writes no tools, which would end a round."""

    monkeypatch.setattr(Engine, "_check_tools", not_checked)
    offered = asked("t-1", called("search", "{}"), [SEARCH])
    call = completed(served_with_thoughts, offered, f"<think>\nI search.\n</think>\n{CALL}")
    assert call.error == "it calls search, and no tool runs in a rollout"
    answer = completed(served_with_thoughts, offered, THOUGHT)
    assert (answer.text.strip(), answer.error, answer.truncated) == ("It is 7.", "", False)


@pytest.mark.slow
def test_an_answer_whose_time_is_up_is_graded_as_far_as_it_came(served_with_thoughts: Served) -> None:
    cut = completed(served_with_thoughts, round_task(), THOUGHT, as_served=True, seconds=0.5)
    assert (cut.text.strip(), cut.truncated, cut.error) == ("It is 7.", True, "")


def test_a_round_has_the_parsers_that_the_server_is_started_with(tmp_path: Path) -> None:
    def parsers(**serving: Any) -> tuple[str, str]:
        settings = Config.model_validate({"serving": serving})
        spec = RoundSpec(
            round_id="r0001", attempt=1, seed=1, debug=False, base_model=str(tmp_path / "Qwen3-4B"), parent=None,
            train=[], held_out=[], rubric={}, settings={},
        )  # fmt: skip
        found = chat_of(spec, settings)
        return found.tool_parser, found.reasoning_parser

    assert parsers() == ("hermes", "qwen3"), "by the model's family"
    assert parsers(tool_call_parser="none", reasoning_parser="deepseek_r1") == ("", "deepseek_r1")


@pytest.mark.slow
def test_a_parser_that_the_server_would_not_have_is_named(served: Served) -> None:
    with pytest.raises(TrainError, match=r"no_such.*serving\.tool_call_parser"):
        served.chat(served_format(["--enable-auto-tool-choice", "--tool-call-parser", "no_such"]))
    with pytest.raises(TrainError, match=r"no_such.*serving\.reasoning_parser"):
        served.chat(served_format(["--reasoning-parser=no_such"]))


def test_tool_calls_stay_in_the_text_unless_the_server_looks_for_them() -> None:
    assert served_format(["--tool-call-parser", "hermes"]).tool_parser == ""
    assert served_format(PARSERS).tool_parser == "hermes"
    assert served_format(PARSERS).reasoning_parser == "deepseek_r1"


@pytest.mark.slow
def test_limits_and_defaults_are_the_servers(tmp_path: Path) -> None:
    """As vLLM's chat endpoint computes them of the model's generation_config.json and of the server's arguments."""
    model = tmp_path / "policy"
    shutil.copytree(POLICY, model)
    defaults = {"do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "max_new_tokens": 90}
    (model / "generation_config.json").write_text(json.dumps(defaults))

    def told(temperature: float | None, *arguments: str, prompt: int = 100) -> tuple[float, int, float, int]:
        [made] = rendering(model, served_format(arguments))
        found = made.chat(served_format(arguments)).sampling(round_task(), prompt, temperature=temperature, seed=3)
        assert found.seed == 3
        return found.temperature, found.top_k, found.repetition_penalty, found.max_tokens

    assert told(None) == (0.5, 7, 1.5, 90)
    assert told(None, prompt=500) == (0.5, 7, 1.5, 12), "what the context of 512 leaves"
    assert told(0.8) == (0.8, 7, 1.5, 90)
    assert told(None, "--generation-config", "vllm") == (1.0, 0, 1.0, 412)
    assert told(None, "--override-generation-config", '{"top_k": 3, "max_new_tokens": 40}') == (0.5, 3, 1.5, 40)


@pytest.mark.slow
def test_a_real_server_makes_the_same_tokens(served: Served, vllm_server: VllmServer, tmp_path: Path) -> None:
    """Of the same messages, with the same template."""
    (tmp_path / "t.jinja").write_text((POLICY / "chat_template.jinja").read_text())
    chat = served_format(["--chat-template", str(tmp_path / "t.jinja")])
    some = asked("t-1", called("search", '{"q":"é"}'), [])
    tokens = asyncio.run(served.chat(chat).encode(some))
    told = httpx2.post(
        f"{vllm_server.url}/tokenize",
        headers=vllm_server.headers,
        json={"model": vllm_server.base_model, "messages": some.prompt, "add_special_tokens": False},
        timeout=60,
    )
    assert told.json()["tokens"] == list(tokens)
