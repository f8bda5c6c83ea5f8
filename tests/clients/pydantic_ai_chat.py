"""Pydantic AI with chat completions."""
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import tools

base_url, key, model, task = tools.arguments()

llm = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=key))
Agent(llm, tools=[tools.write_file, tools.run]).run_sync(task)
