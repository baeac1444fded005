"""Spans as instrumentations write them: `instrumented_agent.py langchain|openai_agents|silent QUESTION…`.

Each reply is an `invoke_agent` span without messages around that of the agent, with the model call below it.
opentelemetry-instrumentation-langchain writes no messages on the inner one either, and puts messages and response id
on the model call. opentelemetry-instrumentation-openai-agents-v2 writes messages on the inner one. `silent` is either
of them without messages, as they are unless capturing content is enabled.
"""

import json
import sys
import uuid
from typing import Any

from openai import OpenAI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def as_text(messages: list[dict[str, Any]]) -> str:
    return json.dumps(
        [{"role": each["role"], "parts": [{"type": "text", "content": each["content"]}]} for each in messages]
    )


def main(kind: str, questions: list[str]) -> None:
    tracing = TracerProvider()
    tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = tracing.get_tracer("instrumentation")
    client = OpenAI()
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are {uuid.uuid4()}."}]
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "graph"}
    outer = {"gen_ai.operation.name": "invoke_agent"} if kind == "openai_agents" else agent
    for question in questions:
        messages.append({"role": "user", "content": question})
        with (
            tracer.start_as_current_span("invoke_agent", attributes=outer),
            tracer.start_as_current_span("invoke_agent graph", attributes=agent) as reply,
        ):
            with tracer.start_as_current_span("chat my-agent") as call:
                response = client.chat.completions.create(model="my-agent", messages=messages)  # type: ignore[arg-type]
                answer = {"role": "assistant", "content": response.choices[0].message.content}
                both = {"gen_ai.input.messages": as_text(messages), "gen_ai.output.messages": as_text([answer])}
                if kind == "silent":
                    both = {}
                call.set_attributes({"gen_ai.operation.name": "chat", "gen_ai.response.id": response.id, **both})
            if kind == "openai_agents":
                reply.set_attributes(both)
        messages.append(answer)
        print(answer["content"])
    tracing.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
