"""Messages with the package `anthropic`."""
from anthropic import Anthropic

from tools import DESCRIPTIONS, SCHEMAS, arguments, call, json

base_url, key, model, task = arguments()
tools = [{"name": name, "description": DESCRIPTIONS[name], "input_schema": SCHEMAS[name]} for name in SCHEMAS]

client = Anthropic(base_url=base_url, api_key=key)
messages = [{"role": "user", "content": task}]
assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 0
while True:
    answer = client.messages.create(model=model, max_tokens=4096, messages=messages, tools=tools)
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    wanted = [block for block in answer.content if block.type == "tool_use"]
    if not wanted:
        break
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": call(block.name, json.dumps(block.input))}
        for block in wanted
    ]
    messages.append({"role": "user", "content": results})
