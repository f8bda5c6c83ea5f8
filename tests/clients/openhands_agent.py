"""OpenHands SDK with its default tools but for the browser, in the current folder."""
import os

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

import tools

base_url, key, model, task = tools.arguments()

llm = LLM(model=f"openai/{model}", base_url=base_url, api_key=key)
agent = get_default_agent(llm=llm, cli_mode=True)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(task)
conversation.run()
