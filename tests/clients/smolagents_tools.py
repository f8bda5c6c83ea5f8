"""smolagents' agent of tool calls."""
from smolagents import OpenAIModel, ToolCallingAgent, tool

import tools

base_url, key, model, task = tools.arguments()

llm = OpenAIModel(model_id=model, api_base=base_url, api_key=key)
agent = ToolCallingAgent(tools=[tool(tools.write_file), tool(tools.run)], model=llm)
agent.run(task)
