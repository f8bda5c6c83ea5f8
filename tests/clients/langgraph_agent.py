"""LangGraph with langchain-openai."""
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import tools

base_url, key, model, task = tools.arguments()

functions = [tool(tools.write_file), tool(tools.run)]
llm = ChatOpenAI(base_url=base_url, api_key=key, model=model)

with_tools = llm.bind_tools(functions)
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [with_tools.invoke(state["messages"])]})
graph.add_node("tools", ToolNode(functions))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition, ["tools", END])
graph.add_edge("tools", "model")
graph.compile().invoke({"messages": [("user", task)]})
