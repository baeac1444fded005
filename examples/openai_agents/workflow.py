"""The agent of the OpenAI Agents SDK as a workflow: `flywheel workflow check workflow.py:run`.

It needs `pip install openai-agents`, in this environment or in that of `rollout.agent.python`.
"""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


set_tracing_disabled(True)


async def run(task, model, auxiliary_models=None, logger=None):
    # `model` is AgentScope's; what any framework needs is in task["openai"].
    where = task["openai"]
    async with AsyncOpenAI(base_url=where["base_url"], api_key=where["api_key"]) as client:
        agent = Agent(
            name="calculator",
            instructions="You are a calculator. Use your tools.",
            model=OpenAIChatCompletionsModel(model=where["model"], openai_client=client),
            tools=[multiply],
        )
        said = [each for each in task["init_messages"] if each["role"] != "system"]
        result = await Runner.run(agent, [*said, {"role": "user", "content": task["main_query"]}])
    return {"response": result.final_output, "metrics": {"model_calls": len(result.raw_responses)}}
