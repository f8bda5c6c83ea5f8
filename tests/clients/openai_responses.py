"""Responses as events, with the package `openai`."""
from openai import OpenAI

from tools import DESCRIPTIONS, SCHEMAS, arguments, call

base_url, key, model, task = arguments()
functions = [
    {"type": "function", "name": name, "description": DESCRIPTIONS[name], "parameters": SCHEMAS[name], "strict": False}
    for name in SCHEMAS
]

client = OpenAI(base_url=base_url, api_key=key)
items = [{"role": "user", "content": task}]
while True:
    with client.responses.stream(model=model, input=items, tools=functions, store=False) as events:
        answer = events.get_final_response()
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
    wanted = [item for item in answer.output if item.type == "function_call"]
    for item in wanted:
        result = call(item.name, item.arguments)
        items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    if not wanted:
        break
