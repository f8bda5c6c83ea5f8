"""LiteLLM as a library."""
import litellm

from tools import DESCRIPTIONS, SCHEMAS, arguments, call

base_url, key, model, task = arguments()
functions = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": SCHEMAS[name]}}
    for name in SCHEMAS
]

messages = [{"role": "user", "content": task}]
while True:
    answer = litellm.completion(
        model=f"openai/{model}", api_base=base_url, api_key=key, messages=messages, tools=functions
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for wanted in message.tool_calls or []:
        result = call(wanted.function.name, wanted.function.arguments)
        messages.append({"role": "tool", "tool_call_id": wanted.id, "content": result})
    if not message.tool_calls:
        break
