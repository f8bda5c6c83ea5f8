"""LlamaIndex's agent of tool calls, which asks for events."""
import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

import tools

base_url, key, model, task = tools.arguments()

llm = OpenAILike(model=model, api_base=base_url, api_key=key, is_chat_model=True, is_function_calling_model=True)


async def main():
    await FunctionAgent(tools=[tools.write_file, tools.run], llm=llm).run(task)


asyncio.run(main())
