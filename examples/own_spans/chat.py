"""A program with spans of its own: `python chat.py "What is 12 times 34?" "And twice that?"`.

Any model may answer. Each reply is one span by OpenTelemetry's conventions for generative AI, with the model call
below it, and goes to `flywheel run` over OTLP.
"""

import json
import sys
import uuid

from openai import OpenAI
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

tracing = TracerProvider()
tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # to http://localhost:4318
trace.set_tracer_provider(tracing)
tracer = trace.get_tracer("chat")


def as_text(messages):
    parts = [{"role": each["role"], "parts": [{"type": "text", "content": each["content"]}]} for each in messages]
    return json.dumps(parts)


client = OpenAI(api_key="unused")
conversation = str(uuid.uuid4())
messages = [{"role": "system", "content": "You are a calculator."}]
for question in sys.argv[1:]:
    messages.append({"role": "user", "content": question})
    about = {"gen_ai.conversation.id": conversation, "gen_ai.agent.name": "calculator"}
    with tracer.start_as_current_span("invoke_agent calculator", attributes=about) as reply:
        reply.set_attribute("gen_ai.operation.name", "invoke_agent")
        reply.set_attribute("gen_ai.input.messages", as_text(messages))
        with tracer.start_as_current_span("chat my-agent", attributes={"gen_ai.operation.name": "chat"}) as call:
            call.set_attribute("gen_ai.input.messages", as_text(messages))
            response = client.chat.completions.create(model="my-agent", messages=messages)
            messages.append({"role": "assistant", "content": response.choices[0].message.content})
            call.set_attribute("gen_ai.output.messages", as_text(messages[-1:]))
            call.set_attribute("gen_ai.request.model", "my-agent")
            call.set_attribute("gen_ai.response.id", response.id)
        reply.set_attribute("gen_ai.output.messages", as_text(messages[-1:]))
    print(messages[-1]["content"])
tracing.shutdown()
