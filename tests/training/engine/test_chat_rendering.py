"""Prompts are those that the server makes: by vLLM's own code, and compared with a real server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flywheel.errors import TrainError
from flywheel.records.round import RoundTask
from flywheel.training.data.prompts import Prompt, seed_of
from flywheel.training.data.rollout import Completion, RolloutRequest
from flywheel.training.engine.chat_rendering import ServedChat
from flywheel.training.engine.engine import Engine
from flywheel.training.engine.served_application import BASE_MODEL, Limits, ServedApplication, server_arguments
from tests.conftest import VllmServer
from tests.factories.chat_rendering import SETTINGS, Served, rendering
from tests.factories.round import POLICY
from tests.factories.task import round_task

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

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


def encoded(served: Served, tasks: list[RoundTask], *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Prompts as text, and what was refused; only vLLM's engine is left out."""
    engine = Engine(SETTINGS)
    engine._chat = served.chat(*arguments)
    prompts, refused = asyncio.run(engine.encode(tasks))
    return [served.decoded(prompt.token_ids) for prompt in prompts], refused


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


def test_a_template_that_leaves_tools_out_ends_the_round(served: Served) -> None:
    """Tasks without tools do not tell, and neither does the user's agent, which has tools of its own."""
    blind = TEMPLATE[TEMPLATE.index("{%- endfor %}") + len("{%- endfor %}") :]
    some = [asked(f"t-{place}", called("search", "{}"), [SEARCH]) for place in range(2)]
    chat = f"--chat-template={blind}"
    with pytest.raises(TrainError, match=r"tools of 2 tasks.*the same prompt.*--chat-template"):
        encoded(served, [round_task("t-plain"), *some], chat)
    without = [round_task("t-plain"), some[0].model_copy(update={"agent": "program"})]
    texts, refused = encoded(served, without, chat)
    assert (len(texts), refused) == (2, {})
    texts, refused = encoded(served, [round_task("t-plain"), *some])
    assert (len(texts), refused) == (3, {})


def test_a_task_on_which_the_template_breaks_costs_itself_alone(served: Served) -> None:
    broken = asked("t-broken", called("break", "{}"), [])
    texts, refused = encoded(served, [round_task("t-1"), broken, round_task("t-2")])
    assert len(texts) == 2
    assert list(refused) == ["t-broken"]


def test_what_the_server_is_told_of_templates_counts(served: Served, tmp_path: Path) -> None:
    chat = ["--dtype", "float32", "--default-chat-template-kwargs", '{"thinking": true}']
    [text], _ = encoded(served, [round_task()], *chat)
    assert text.endswith("<|im_start|>assistant\n")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[-1].content }}!")
    [text], _ = encoded(served, [round_task()], f"--chat_template={other}")
    assert text == "What is 3 plus 4?!"
    with pytest.raises(TrainError, match=r"cannot read the chat template /nowhere\.jinja"):
        encoded(served, [round_task()], "--chat-template", "/nowhere.jinja")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--default-chat-template-kwargs", "{thinking}"], "--default-chat-template-kwargs"),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs: it is no JSON object"),
        (["--chat-template-content-format", "html"], "--chat-template-content-format: invalid choice: 'html'"),
        (["--no-such-argument"], "unrecognized arguments: --no-such-argument"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "no_such"], "no_such"),
        (["--reasoning-parser=no_such"], "no_such"),
        (["--help"], "--help"),
    ],
    ids=str,
)
def test_arguments_that_the_server_refuses_are_told_in_one_sentence(wrong: list[str], why: str) -> None:
    expected = rf"cannot answer as the server does: [^\n]*{re.escape(why)}[^\n]*serving\.extra_args"
    with pytest.raises(TrainError, match=expected):
        server_arguments(wrong, "a-model")


async def test_a_round_names_such_arguments_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    engine = Engine(replace(SETTINGS, model=str(POLICY), server=("--reasoning-parser", "no_such")))
    with pytest.raises(TrainError, match="no_such"):
        await engine.start()
    assert engine._llm is None


def test_only_arguments_of_chats_are_the_servers(tmp_path: Path) -> None:
    """Neither its middleware nor its log of requests is for rollouts."""
    config = tmp_path / "server.yaml"
    config.write_text("reasoning-parser: deepseek_r1\nport: 9\n")
    found = server_arguments(["--middleware", "no.such", "--enable_log_requests", "--config", str(config)], "a-model")
    assert (found.middleware, found.enable_log_requests, found.port) == ([], False, 8000)
    assert found.structured_outputs_config.reasoning_parser == found.reasoning_parser == "deepseek_r1"


THOUGHT = "<think>\n3 and 4 make 7.\n</think>\n\nIt is 7."
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "7"}}\n</tool_call>'
PARSERS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"]


class Written:
    """Takes the place of vLLM's engine below its application: it generates this text, and then ends, or goes on until
    it is aborted.

    Attributes:
        sampling: The parameters of the last request.
        logprob: That of each token.
        is_cancelled: Whether a generation was; vLLM's engine aborts the request then.
    """

    logprob = -0.5
    is_cancelled = False
    errored = False
    input_processor = None

    def __init__(self, served: Served, text: str, *, ends: bool = True) -> None:
        self.model_config, self.vllm_config, self.renderer = served.model_config, served.vllm_config, served.renderer
        self.sampling: Any = None
        self._text, self._aborted = text, asyncio.Event()
        if ends:
            self._aborted.set()
        self._ends = ends

    async def generate(self, prompt: Any, sampling: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput

        self.sampling, self._asked = sampling, request_id
        try:
            await self._aborted.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        ids = self.renderer.get_tokenizer().encode(self._text, add_special_tokens=False)
        drawn = [{token: Logprob(self.logprob, 1, "x")} for token in ids]
        why = "stop" if self._ends else "abort"
        made = CompletionOutput(0, self._text, ids, None, drawn, finish_reason=why)
        yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [made], finished=True)

    async def abort(self, request_id: str) -> None:
        assert request_id == self._asked
        self._aborted.set()

    def check_admission(self, _: int) -> None:
        pass

    async def is_tracing_enabled(self) -> bool:
        return False


async def completed(llm: Written, some: RoundTask, *arguments: str, **values: Any) -> Completion:
    """A rollout through vLLM's own application."""
    engine = Engine(SETTINGS)
    given = server_arguments(arguments, llm.model_config.model)
    engine._chat = ServedChat(given, llm.model_config, llm.renderer)
    engine._application, engine._context = await ServedApplication.build(llm, given), 512
    ids = await engine._chat.encode(some)
    request = RolloutRequest(Prompt(some, ids), 0, 7, 1.0, 64, None)
    return await engine.generate(replace(request, **values))


async def test_answers_are_what_the_servers_parsers_leave_of_them(served_with_thoughts: Served) -> None:
    async def answer(some: RoundTask, text: str, *arguments: str) -> Completion:
        return await completed(Written(served_with_thoughts, text), some, *arguments, as_served=True)

    assert (await answer(round_task(), THOUGHT)).text == THOUGHT
    assert (await answer(round_task(), THOUGHT, *PARSERS)).text.strip() == "It is 7."
    assert (await answer(round_task(), "<think>\n3 and 4 and", *PARSERS)).text == "", "it has not begun to answer"
    # An agent that offered no tools gets the text of a call as its answer.
    called_none = await answer(round_task(), f"<think></think>{CALL}", *PARSERS)
    assert (called_none.text.strip(), called_none.calls) == (CALL, ())
    offered = asked("t-1", called("search", "{}"), [SEARCH])
    call = await answer(offered, f"<think>\nI search.\n</think>\n{CALL}", *PARSERS)
    assert (call.missed, call.error) == (True, 'no recorded result for search({"q": "7"})')


async def test_an_answer_whose_time_is_up_is_graded_as_far_as_it_came(served_with_thoughts: Served) -> None:
    def cut(text: str) -> Any:
        return completed(
            Written(served_with_thoughts, text, ends=False), round_task(), *PARSERS, as_served=True, seconds=0.5
        )

    made = await cut(THOUGHT)
    assert (made.text.strip(), made.truncated, made.error, made.loop) == ("It is 7.", True, "", "")
    assert (await cut("")).error == "no message within 0.5 s"


async def test_limits_and_defaults_are_the_servers(tmp_path: Path) -> None:
    """As vLLM's chat endpoint computes them of the model's generation_config.json and of the server's arguments."""
    model = tmp_path / "policy"
    shutil.copytree(POLICY, model)
    defaults = {"do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "max_new_tokens": 90}
    (model / "generation_config.json").write_text(json.dumps(defaults))

    async def told(temperature: float | None, *arguments: str, words: int = 1) -> tuple[float, int, float, int]:
        """The last one is the limit, and what the prompt leaves of the context if that is the limit."""
        for made in rendering(model, *arguments):
            llm, prompt = Written(made, "7"), [{"role": "user", "content": "What is 3 plus 4? " * words}]
            some = round_task(prompt=prompt)
            await completed(llm, some, *arguments, as_served=True, temperature=temperature)
            found, room = llm.sampling, 512 - len(await made.chat().encode(some))
        assert found.seed == seed_of(7, 0)
        limit = -1 if found.max_tokens == room else found.max_tokens
        return found.temperature, found.top_k, found.repetition_penalty, limit

    assert await told(None) == (0.5, 7, 1.5, 90)
    assert await told(None, words=52) == (0.5, 7, 1.5, -1), "what the context of 512 leaves"
    assert await told(0.8) == (0.8, 7, 1.5, 90)
    assert await told(None, "--generation-config", "vllm") == (1.0, 0, 1.0, -1)
    assert await told(None, "--override-generation-config", '{"top_k": 3, "max_new_tokens": 40}') == (0.5, 3, 1.5, 40)


PATH = "/v1/chat/completions"
VALID: dict[str, Any] = {
    "model": BASE_MODEL,
    "messages": [{"role": "user", "content": "What is 3 plus 4?"}],
    "logprobs": True,
    "max_tokens": 64,
}
REQUESTS: list[dict[str, Any]] = [
    {},
    {"top_logprobs": 1, "stop": ["3"], "return_token_ids": True},
    {"tools": [SEARCH], "tool_choice": "required"},
    {"messages": called("search", '{"q": "7"}')},
    {"messages": called("search", "{")},
    {"messages": called("break", "{}")},
    {"messages": []},
    {"messages": "Hello"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
    {"messages": [{"role": "user", "content": "What? " * 600}]},
    {"model": "another"},
    {"max_tokens": 0},
    {"max_completion_tokens": "many"},
    {"temperature": -1},
    {"top_logprobs": 99},
    {"tools": [{"type": "function"}]},
    {"tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"response_format": {"type": "json_schema"}},
    {"structured_outputs": {"regex": "(", "choice": ["a"]}},
    {"n": 2},
    {"stop": {"a": 1}, "seed": "x"},
]


@pytest.mark.parametrize("is_verbose", [False, True])
@pytest.mark.parametrize("text", ["It is 7.", CALL, THOUGHT])
async def test_replies_and_refusals_are_those_of_vllms_web_application(
    served_with_thoughts: Served, served: Served, text: str, is_verbose: bool
) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    def plain(body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices", ()):
            for call in choice["message"].get("tool_calls") or ():
                del call["id"]
        return {key: value for key, value in body.items() if key not in ("id", "created")}

    for made, arguments in ((served_with_thoughts, PARSERS), (served, ())):
        llm, given = Written(made, text), server_arguments(arguments, made.model_config.model)
        # As with VLLM_SERVER_DEV_MODE.
        given.log_error_stack = is_verbose
        ours = await ServedApplication.build(llm, given)
        app = build_app(given, ("generate",), made.model_config)
        await init_app_state(llm, app.state, given, ("generate",))
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            statuses = set()
            for change in REQUESTS:
                body = {**VALID, **change}
                answer = await client.post(PATH, json=body)
                status, found = await ours.chat(body, Limits(ours.context))
                assert (status, plain(found)) == (answer.status_code, plain(answer.json())), change
                statuses.add(status)
            llm.logprob = math.nan
            answer, (status, found) = await client.post(PATH, json=VALID), await ours.chat(VALID, Limits(512))
            assert (status, found) == (answer.status_code, answer.json())
        assert {200, 400, 404} <= statuses
        assert status == 400, "JSON has no such number"


async def test_a_cancelled_call_is_cancelled_in_the_engine(served: Served) -> None:
    llm = Written(served, "It is 7.", ends=False)
    ours = await ServedApplication.build(llm, server_arguments((), served.model_config.model))
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}
    call = asyncio.create_task(ours.chat(body, Limits(ours.context)))
    async with asyncio.timeout(60):
        while llm.sampling is None:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while not llm.is_cancelled:
            await asyncio.sleep(0.01)


def test_a_worker_plans_its_engines_without_vllm() -> None:
    """Only the engine's actor loads it."""
    code = (
        "import sys; sys.modules['vllm'] = None; from flywheel.training.worker.round import Round;"
        "from flywheel.config.file import Config; from flywheel.serving.server.vllm_command import chat_arguments;"
        "print(chat_arguments('/m/Qwen3-4B', Config().serving)[:1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['--enable-auto-tool-choice']\n"


def test_a_real_server_makes_the_same_tokens(served: Served, vllm_server: VllmServer, tmp_path: Path) -> None:
    """Of the same messages, with the same template."""
    (tmp_path / "t.jinja").write_text((POLICY / "chat_template.jinja").read_text())
    chat = served.chat("--chat-template", str(tmp_path / "t.jinja"))
    some = asked("t-1", called("search", '{"q":"é"}'), [])
    tokens = asyncio.run(chat.encode(some))
    told = httpx2.post(
        f"{vllm_server.url}/tokenize",
        headers=vllm_server.headers,
        json={"model": vllm_server.base_model, "messages": some.prompt, "add_special_tokens": False},
        timeout=60,
    )
    assert told.json()["tokens"] == list(tokens)
