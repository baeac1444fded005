"""The desk's agent, made with AgentScope, and its traces in a Studio database.

AgentScope's own tracing makes the spans; they are written as Studio's server writes those that it receives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import openai
from agentscope.agent import Agent, InjectionConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.middleware import TracingMiddleware
from agentscope.model import OpenAIChatModel
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from demo.studio import StudioDatabase
from demo.support_desk.messages import SYSTEM_PROMPT, Message
from flywheel.sources.otlp.inbox import COLUMNS
from flywheel.sources.otlp.rows import rows_of

AGENT: Final = "desk"
SERVICE: Final = "support-desk"
MAX_TOKENS: Final = 64
AT_ONCE: Final = 32
ANSWER_SECONDS: Final = 300.0


class StudioExporter(SpanExporter):
    """Writes finished spans to a Studio database."""

    def __init__(self, database: StudioDatabase) -> None:
        self._database = database

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        rows = rows_of(encode_spans(spans)).accepted
        self._database.export([dict(zip(COLUMNS, row, strict=True)) for row in rows])
        return SpanExportResult.SUCCESS


@contextlib.contextmanager
def traced(database: StudioDatabase) -> Iterator[TracerProvider]:
    """Spans of this process go to the database: by `force_flush` of what is yielded, and by the end.

    OpenTelemetry permits it once in a process.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(StudioExporter(database), schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    try:
        yield provider
    finally:
        provider.shutdown()


async def answers(
    url: str, model: str, messages: Sequence[Message], *, temperature: float = 1.0, tracing: bool = True
) -> list[str]:
    """The agent's answer to each message, by a model at an OpenAI-compatible endpoint (with `/v1`).

    Raises openai.OpenAIError where the endpoint fails.
    """
    chat = OpenAIChatModel(
        credential=OpenAICredential(api_key="unused", base_url=url),
        model=model,
        parameters=OpenAIChatModel.Parameters(temperature=temperature, max_tokens=MAX_TOKENS),
        stream=False,
        # The endpoint is on this machine: a proxy of the environment is not for it.
        client_kwargs={
            "http_client": openai.DefaultAsyncHttpxClient(trust_env=False),
            "timeout": ANSWER_SECONDS,
        },
    )
    places = asyncio.Semaphore(AT_ONCE)

    async def answer(message: Message) -> str:
        async with places:
            agent = Agent(
                name=AGENT,
                system_prompt=SYSTEM_PROMPT,
                model=chat,
                middlewares=[TracingMiddleware()] if tracing else [],
                # Without the runtime reminder, which AgentScope does not trace, the traces have the exact prompts.
                injection_config=InjectionConfig(inject_runtime_state=False),
            )
            reply = await agent.reply(UserMsg(name="user", content=message.text))
            return (reply.get_text_content() or "").strip()

    try:
        return list(await asyncio.gather(*map(answer, messages)))
    finally:
        await chat.client.close()
