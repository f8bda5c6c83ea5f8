#!/usr/bin/env python3
"""A small coding agent as a command: mini_agent.py TASK works on the file lines.txt of the current folder.

It knows nothing of sessions, policies or training. The address and the key of its model are in OPENAI_BASE_URL and
OPENAI_API_KEY, and its prompts are its own. The task `b9` is to write 9 behind the letter b. If the model says `?b`, a
sub-agent looks for the line; then the context is full, so the model writes a summary and goes on with the task and the
summary. What else the model says is the edit: `29` writes 9 in line 2.
"""

import http.client
import json
import os
import pathlib
import re
import sys
import urllib.parse

FILE = pathlib.Path("lines.txt")

ANSWER_TOKENS = 4

CALL_S = 60


def say(messages, **headers):
    """What the model says next. It becomes part of the conversation."""
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc, timeout=CALL_S)
    body = json.dumps({"model": "coder", "messages": messages, "max_tokens": ANSWER_TOKENS})
    key = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", body, {**key, **headers})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        sys.exit(f"the model answered with status {response.status}: {answer.decode(errors='replace')}")
    said = json.loads(answer)["choices"][0]["message"]["content"] or ""
    messages.append({"role": "assistant", "content": said})
    return said


def find(letter, lines):
    """The sub-agent reads line by line, and says y or n."""
    messages = []
    for number, line in enumerate(lines, 1):
        if messages:
            messages.append({"role": "tool", "content": line, "tool_call_id": "next"})
        else:
            messages.append({"role": "user", "content": f"{letter}|{line}"})
        if say(messages, **{"x-claude-code-agent-id": "finder"}) == "y":
            return str(number)
    return "-"


def edit(change, lines):
    """Writes a digit behind the letter of a line, if the edit is understood."""
    if re.fullmatch(r"[1-9]\d", change) and int(change[0]) <= len(lines):
        place = int(change[0]) - 1
        lines[place] = lines[place][:1] + change[1]
        FILE.write_text("".join(line + "\n" for line in lines))


def main():
    task, lines = sys.argv[1], FILE.read_text().splitlines()
    messages = [{"role": "user", "content": task}]
    said = say(messages)
    if said.startswith("?"):
        found = find(said[1:], lines)
        messages.append({"role": "tool", "content": found, "tool_call_id": "find"})
        messages.append({"role": "user", "content": "!"})
        said = say([{"role": "user", "content": f"{task}|{say(messages)}"}])
    edit(said, lines)


if __name__ == "__main__":
    main()
