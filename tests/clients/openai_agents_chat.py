"""OpenAI Agents SDK with chat completions."""
from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool

import tools

base_url, key, model, task = tools.arguments()

agent = Agent(name="fixer", model=model, tools=[function_tool(tools.write_file), function_tool(tools.run)])
provider = OpenAIProvider(base_url=base_url, api_key=key, use_responses=False)
Runner.run_sync(agent, task, run_config=RunConfig(model_provider=provider, tracing_disabled=True))
