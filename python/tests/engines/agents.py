"""Agents that use the clients of OpenAI and of Anthropic as programs do, and what they received."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
from tiny import TOOLS

import forebay

TOKENS_MAX = 100
Result = Callable[[str], str]


@dataclass
class Answer:
    """What an agent received, in the same form for each dialect."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stopped_by: str | None = None


def called(name: str, arguments: Any) -> tuple[str, Any]:
    """A tool call. Messages has its arguments as an object, so the spelling of the others does not count.

    What is no object is a text in one.
    """
    if isinstance(arguments, dict) and list(arguments) == ["invalid_arguments"]:
        return name, arguments["invalid_arguments"]
    try:
        return name, json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return name, arguments


def chat(session: forebay.sessions.Session, turns: list[str], stream: bool, **extra: Any) -> list[Answer]:
    """Chat completions. It sends no reasoning back, as most agents."""
    messages: list[Any] = []
    options: dict[str, Any] = {"model": "m", "max_tokens": TOKENS_MAX, **extra}
    answers: list[Answer] = []
    with openai.OpenAI(base_url=session.base_url, api_key=session.key) as client:
        for turn in turns:
            wanted = messages[-1].get("tool_calls", []) if messages else []
            results = [{"role": "tool", "tool_call_id": call["id"], "content": turn} for call in wanted]
            messages += results or [{"role": "user", "content": turn}]
            if stream:
                with client.chat.completions.stream(
                    messages=messages, stream_options={"include_usage": True}, **options
                ) as events:
                    # The final completion is an error if the answer has reached its bound.
                    received: Any = events.until_done().current_completion_snapshot
            else:
                received = client.chat.completions.create(messages=messages, **options)
            (choice,) = received.choices
            message = choice.message.model_dump(exclude_none=True)
            calls = message.get("tool_calls", [])
            answers.append(
                Answer(
                    message.get("content", ""),
                    message.get("reasoning", ""),
                    [called(call["function"]["name"], call["function"]["arguments"]) for call in calls],
                    received.usage.prompt_tokens,
                    received.usage.completion_tokens,
                )
            )
            back = {"role": "assistant", "content": message.get("content")}
            functions = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {k: call["function"][k] for k in ("name", "arguments")},
                }
                for call in calls
            ]
            messages.append({**back, "tool_calls": functions} if functions else back)
    return answers


def responses(session: forebay.sessions.Session, turns: list[str], stream: bool, **extra: Any) -> list[Answer]:
    """Responses. It sends each item back as it came."""
    items: list[Any] = []
    options: dict[str, Any] = {"model": "m", "max_output_tokens": TOKENS_MAX, "store": False, **extra}
    if "tools" in options:
        options["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in options["tools"]]
    answers: list[Answer] = []
    wanted: list[Any] = []
    with openai.OpenAI(base_url=session.base_url, api_key=session.key) as client:
        for turn in turns:
            results = [{"type": "function_call_output", "call_id": item.call_id, "output": turn} for item in wanted]
            items += results or [{"role": "user", "content": turn}]
            if stream:
                with client.responses.stream(input=items, **options) as events:
                    received: Any = events.get_final_response()
            else:
                received = client.responses.create(input=items, **options)
            wanted = [item for item in received.output if item.type == "function_call"]
            thoughts = [
                part.text for item in received.output if item.type == "reasoning" for part in item.content or []
            ]
            answers.append(
                Answer(
                    received.output_text,
                    "".join(thoughts),
                    [called(item.name, item.arguments) for item in wanted],
                    received.usage.input_tokens,
                    received.usage.output_tokens,
                )
            )
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in received.output]
    return answers


def messages(session: forebay.sessions.Session, turns: list[str], stream: bool, **extra: Any) -> list[Answer]:
    """Messages. It sends each block back as it came."""
    history: list[Any] = []
    options: dict[str, Any] = {"model": "m", "max_tokens": TOKENS_MAX, **extra}
    if "tools" in options:
        options["tools"] = [
            {
                **{k: tool["function"][k] for k in ("name", "description")},
                "input_schema": tool["function"]["parameters"],
            }
            for tool in options["tools"]
        ]
    answers: list[Answer] = []
    wanted: list[Any] = []
    with anthropic.Anthropic(base_url=session.anthropic_url, api_key=session.key) as client:
        for turn in turns:
            results = [{"type": "tool_result", "tool_use_id": block.id, "content": turn} for block in wanted]
            history.append({"role": "user", "content": results or turn})
            if stream:
                with client.messages.stream(messages=history, **options) as events:
                    received: Any = events.get_final_message()
            else:
                received = client.messages.create(messages=history, **options)
            wanted = [block for block in received.content if block.type == "tool_use"]
            answers.append(
                Answer(
                    "".join(block.text for block in received.content if block.type == "text"),
                    "".join(block.thinking for block in received.content if block.type == "thinking"),
                    [called(block.name, block.input) for block in wanted],
                    received.usage.input_tokens + (received.usage.cache_read_input_tokens or 0),
                    received.usage.output_tokens,
                    received.stop_sequence,
                )
            )
            history.append(
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in received.content]}
            )
    return answers


AGENTS: dict[str, Callable[..., list[Answer]]] = {"chat": chat, "responses": responses, "messages": messages}
__all__ = ["AGENTS", "TOOLS", "Answer"]
