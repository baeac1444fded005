"""An AgentScope 2.x agent with a tool as a workflow: `flywheel workflow check agent.py:run --task tasks.jsonl`.

Each rollout makes a new agent, which continues the conversation of the task. With `rollout.reward: {workflow: 1}` the
reward that is returned here counts, too.
"""

from agentscope.agent import Agent
from agentscope.message import AssistantMsg, UserMsg
from agentscope.tool import FunctionTool, Toolkit

MESSAGES = {"user": UserMsg, "assistant": AssistantMsg}


async def run(task, model, auxiliary_models=None, logger=None):
    results = []

    def multiply(a: int, b: int) -> str:
        """Multiply two whole numbers."""
        results.append(str(a * b))
        return results[-1]

    agent = Agent(
        name="calculator",
        system_prompt="You are a calculator. Use your tools.",
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(multiply, is_read_only=True)]),
    )
    earlier = [each for each in task["init_messages"] if each["role"] in MESSAGES]
    await agent.observe([MESSAGES[each["role"]](name=each["role"], content=each["content"]) for each in earlier])
    answer = await agent.reply(UserMsg(name="user", content=task["main_query"]))
    response = answer.get_text_content() or ""
    return {
        "response": response,  # the rubric's judge reads it
        "reward": float(any(result in response for result in results)),
        "metrics": {"tool_calls": len(results)},  # their means are in the round's metrics.jsonl
    }
