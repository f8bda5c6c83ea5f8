"""Chat completions as events, with the package `openai`."""
from openai import OpenAI

from tools import DESCRIPTIONS, SCHEMAS, arguments, call

base_url, key, model, task = arguments()
functions = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": SCHEMAS[name]}}
    for name in SCHEMAS
]

client = OpenAI(base_url=base_url, api_key=key)
messages = [{"role": "user", "content": task}]
while True:
    with client.chat.completions.stream(
        model=model, messages=messages, tools=functions, stream_options={"include_usage": True}
    ) as events:
        answer = events.get_final_completion()
    assert answer.usage.completion_tokens > 0
    message = answer.choices[0].message
    sent_back = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        sent_back["tool_calls"] = [
            {
                "id": wanted.id,
                "type": "function",
                "function": {"name": wanted.function.name, "arguments": wanted.function.arguments},
            }
            for wanted in message.tool_calls
        ]
    messages.append(sent_back)
    for wanted in message.tool_calls or []:
        result = call(wanted.function.name, wanted.function.arguments)
        messages.append({"role": "tool", "tool_call_id": wanted.id, "content": result})
    if not message.tool_calls:
        break
