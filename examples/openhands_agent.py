#!/usr/bin/env python3
"""OpenHands as a command: openhands_agent.py TASK works on a task in the current folder.

It needs Python 3.12 and the packages openhands-sdk and openhands-tools. The address and the key of the model are in
OPENAI_BASE_URL and OPENAI_API_KEY, where `group.py` puts those of a session.
"""

import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent

# A session accepts any name of a model. LiteLLM needs the part before the slash.
llm = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
conversation = Conversation(agent=get_default_agent(llm=llm, cli_mode=True), workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
