"""Agents whose spans OpenInference writes: `openinference_agent.py SCENARIO QUESTION…`, all of one session.

The scenarios `turns`, `stream`, `nested` and `handoff` are agents of OpenAI's SDK; in the first of them the calls of
its client are traced as well. `loop` is an agent by hand on
OpenAI's client, with a question about an image at its end, and `alone` that client's calls without a span above them.
"""

import asyncio
import json
import sys
from typing import Any

from agents import Agent, Runner, SQLiteSession, function_tool, set_default_openai_api
from openai import OpenAI, OpenAIError
from openinference.instrumentation import TracerProvider, using_attributes
from openinference.instrumentation.openai import OpenAIInstrumentor
from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor

MODEL = "my-agent"
IMAGE = "data:image/png;base64,iVBORw0KGgo="


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def agent_for(scenario: str) -> Agent[Any]:
    calculator = Agent(name="calculator", instructions="You calculate.", tools=[multiply], model=MODEL)
    if scenario == "nested":
        ask = calculator.as_tool("ask", "Ask the calculator.")
        return Agent(name="chief", instructions="You delegate.", tools=[ask], model=MODEL)
    if scenario == "handoff":
        return Agent(name="front", instructions="You hand over.", handoffs=[calculator], model=MODEL)
    return calculator


async def with_sdk(scenario: str, questions: list[str]) -> None:
    agent, session = agent_for(scenario), SQLiteSession("memory")
    for question in questions:
        if scenario == "stream":
            result = Runner.run_streamed(agent, question, session=session)
            async for _ in result.stream_events():
                pass
            print(result.final_output)
        else:
            print((await Runner.run(agent, question, session=session)).final_output)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "multiply", "parameters": SCHEMA}}]


def by_hand(scenario: str, questions: list[str], tracer: Any) -> None:
    client = OpenAI(max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "You calculate."}]

    @tracer.tool(name="multiply")
    def product(a: int, b: int) -> str:
        return json.dumps({"product": a * b})

    @tracer.agent(name="calculator")
    def answer(question: str) -> str:
        messages.append({"role": "user", "content": question})
        while True:
            said = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content or ""
            for call in said.tool_calls:
                result = product(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    @tracer.chain
    def looked_at(question: str) -> str:
        part = {"type": "image_url", "image_url": {"url": IMAGE}}
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": question}, part]}]
        chunks = client.chat.completions.create(model=MODEL, messages=asked, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    if scenario == "alone":
        for question in questions:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
        return
    *others, last = questions
    for question in others:
        print(answer(question))
    print(looked_at(last))


def main(scenario: str, questions: list[str]) -> None:
    tracing = TracerProvider()
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    set_default_openai_api("chat_completions")
    with using_attributes(session_id="s-1", user_id="ann", metadata={"name": "a release", "id": "7"}):
        try:
            if scenario in ("loop", "alone", "turns"):
                OpenAIInstrumentor().instrument(tracer_provider=tracing)
            if scenario in ("loop", "alone"):
                by_hand(scenario, questions, tracing.get_tracer("by hand"))
            else:
                OpenAIAgentsInstrumentor().instrument(tracer_provider=tracing)
                asyncio.run(with_sdk(scenario, questions))
        except OpenAIError as error:
            print(type(error).__name__)
    tracing.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
