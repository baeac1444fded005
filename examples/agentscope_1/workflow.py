"""An AgentScope 1.x agent with a tool as a workflow, in an environment of its own: `rollout.agent.python`.

`flywheel workflow env` makes one. Each rollout makes a new agent, which continues the conversation of the task.
"""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse


def multiply(a: int, b: int) -> ToolResponse:
    """Multiply two whole numbers.

    Args:
        a (int): the first number
        b (int): the second number
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a * b))])


async def run(task, model, auxiliary_models=None, logger=None):
    toolkit = Toolkit()
    toolkit.register_tool_function(multiply)
    agent = ReActAgent(
        name="calculator",
        sys_prompt="You are a calculator. Use your tools.",
        model=model,
        formatter=OpenAIChatFormatter(),
        memory=InMemoryMemory(),
        toolkit=toolkit,
    )
    agent.set_console_output_enabled(False)
    earlier = [each for each in task["init_messages"] if each["role"] != "system"]
    await agent.observe([Msg(each["role"], each["content"], each["role"]) for each in earlier])
    answer = await agent(Msg("user", task["main_query"], "user"))
    return {"response": answer.get_text_content()}
