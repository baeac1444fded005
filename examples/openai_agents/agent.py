"""An agent of the OpenAI Agents SDK with a tool: `python agent.py "What is 12 times 34?"`.

It needs `pip install openai-agents`. Its own tracing, which sends to OpenAI, is off: the call log of `flywheel serve`
is all that Flywheel needs.
"""

import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 is `flywheel serve`, and my-agent the alias. OPENAI_API_KEY must be set.
set_default_openai_api("chat_completions")
set_tracing_disabled(True)
instructions = "You are a calculator. Use your tools."
agent = Agent(name="calculator", instructions=instructions, model="my-agent", tools=[multiply])

messages = []
for question in sys.argv[1:]:
    result = Runner.run_sync(agent, [*messages, {"role": "user", "content": question}])
    messages = result.to_input_list()
    print(result.final_output)
