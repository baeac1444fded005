"""A LangGraph agent with a tool: `python agent.py "What is 12 times 34?"`.

It needs `pip install langgraph langchain-openai`. It has no tracing: the call log of `flywheel serve` is all that
Flywheel needs.
"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 is `flywheel serve`, and my-agent the alias.
model = ChatOpenAI(model="my-agent", api_key="unused").bind_tools([multiply])


def think(state: MessagesState) -> MessagesState:
    return {"messages": [model.invoke([("system", "You are a calculator. Use your tools."), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([multiply]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile()

messages = []
for question in sys.argv[1:]:
    messages = agent.invoke({"messages": [*messages, ("user", question)]})["messages"]
    print(messages[-1].content)
