"""AutoGen's AssistantAgent."""
import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

import tools

base_url, key, model, task = tools.arguments()

llm = OpenAIChatCompletionClient(
    model=model,
    base_url=base_url,
    api_key=key,
    model_info={
        "family": "unknown", "function_calling": True, "json_output": False, "structured_output": False, "vision": False
    },
)


async def main():
    await AssistantAgent("fixer", llm, tools=[tools.write_file, tools.run], max_tool_iterations=5).run(task=task)
    await llm.close()


asyncio.run(main())
