"""The LangGraph agent as a workflow: `flywheel workflow check workflow.py:run`.

It needs `pip install langgraph langchain-openai`, in this environment or in that of `rollout.agent.python`.
"""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def graph_with(model):
    async def think(state):
        instructions = ("system", "You are a calculator. Use your tools.")
        return {"messages": [await model.ainvoke([instructions, *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


async def run(task, model, auxiliary_models=None, logger=None):
    # `model` is AgentScope's; what any framework needs is in task["openai"]: base_url, api_key and model.
    agent = graph_with(ChatOpenAI(**task["openai"]).bind_tools([multiply]))
    said = [each for each in task["init_messages"] if each["role"] != "system"]
    messages = (await agent.ainvoke({"messages": [*said, ("user", task["main_query"])]}))["messages"]
    return {"response": messages[-1].content, "metrics": {"messages": len(messages)}}
