"""An agent whose spans Langfuse's SDK writes: `langfuse_agent.py SCENARIO QUESTION…`, all of one session.

`agent` and `plain` differ in the type of the outermost observation, `silent` records none of its arguments, `stream`
reads the answer in pieces, and `alone` are calls of the model without a span above them.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from langfuse import Langfuse, observe, propagate_attributes
from langfuse.openai import OpenAI
from openai import OpenAIError
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

MODEL = "my-agent"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "multiply", "parameters": SCHEMA}}]

client = OpenAI(max_retries=0)
messages: list[Any] = [{"role": "system", "content": "You calculate."}]


@observe(as_type="tool")
def multiply(a: int, b: int) -> int:
    return a * b


def answer(question: str, customer: str = "") -> str:
    messages.append({"role": "user", "content": question})
    while True:
        said = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content or ""
        for call in said.tool_calls:
            result = str(multiply(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@observe(as_type="agent")
def calculator(question: str, customer: str) -> dict[str, Any]:
    return {"text": answer(question), "customer": customer}


def streamed(question: str) -> str:
    messages.append({"role": "user", "content": question})
    chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def alone(question: str) -> str:
    asked: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=MODEL, messages=asked).choices[0].message.content or ""


SCENARIOS: dict[str, Callable[[str], str]] = {
    "agent": lambda question: str(calculator(question, "customer 7")["text"]),
    "plain": observe(name="helpdesk")(answer),
    "silent": observe(name="helpdesk", capture_input=False, capture_output=False)(answer),
    "stream": observe(name="helpdesk")(streamed),
    "alone": alone,
}


def main(scenario: str, questions: list[str]) -> None:
    tracing = TracerProvider()
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(tracing)
    Langfuse(public_key="pk-lf-test", secret_key="sk-lf-test", tracer_provider=tracing)
    with propagate_attributes(session_id="s-1", user_id="ann"):
        for question in questions:
            try:
                print(SCENARIOS[scenario](question))
            except OpenAIError as error:
                print(type(error).__name__)
    tracing.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
