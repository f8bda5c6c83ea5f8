"""Writes a recording of what a client sent: record.py RAW OUTPUT.

A recording has the structure and the fields of each request, in their order. Texts that the client's authors wrote, such
as prompts and descriptions of tools, are replaced by placeholders: the same text always has the same placeholder. Answers
of the model and results of tools stay. A field that an earlier request had as well is named in `kept`, and for a list
`prefix` counts the first items that an earlier request had.
"""
import hashlib
import json
import re
import sys

# Texts that are at most this long stay.
SHORT = 40
HEADERS = {
    "accept", "anthropic-beta", "anthropic-version", "authorization", "content-type", "user-agent", "x-api-key",
    "x-openai-subagent", "x-parent-session-id", "x-session-id", "x-stainless-read-timeout", "x-stainless-retry-count",
    "x-stainless-timeout",
}
LINEAGE = ("x-claude-code-", "x-codex-", "x-litellm-")
TASK = "The test in test_calc.py fails. Fix calc.py, then run python3 test_calc.py."


def placeholder(text):
    """A short text instead of a long one. The task stays, because scripts are found by it."""
    if len(text) <= SHORT or text == TASK:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    made = f"<text {digest}, {len(text)} characters>"
    return f"{made} {TASK}" if TASK in text else made


def tools(value):
    """The same tools. Names, types and required fields stay."""
    if isinstance(value, dict):
        return {name: tools(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [tools(inner) for inner in value]
    return placeholder(value) if isinstance(value, str) else value


def content(value):
    """The content of a message of an operator or a user."""
    if isinstance(value, str):
        # DSPy sends its fields as lines, of which a later call has the same ones and more.
        pieces = value.split("\n") if "[[ ## " in value else [value]
        return "\n".join(placeholder(piece) for piece in pieces)
    return [part | {"text": placeholder(part["text"])} if "text" in part else part for part in value]


def item(value):
    """A message or an item of the conversation. What the model or a tool wrote stays."""
    if value.get("role") in ("system", "developer", "user") and "content" in value:
        kinds = {part.get("type") for part in value["content"]} if isinstance(value["content"], list) else set()
        if "tool_result" in kinds:
            return value | {"content": [
                part | {"text": placeholder(part["text"])} if part.get("type") == "text" else part
                for part in value["content"]
            ]}
        return value | {"content": content(value["content"])}
    return value


def field(name, value):
    if name == "tools":
        return tools(value)
    if name in ("messages", "input") and isinstance(value, list):
        return [item(inner) for inner in value]
    if name in ("system", "instructions", "input"):
        return content(value)
    if name in ("metadata", "client_metadata"):
        return tools(value)
    return value


def recorded(run):
    """The requests of a run."""
    def neutral(text):
        text = text.replace(run["folders"][0], "/task").replace(run["folders"][1], "/home/agent")
        text = text.replace(run["session"], "SESSION")
        # OpenHands tells the model where Python is.
        return re.sub(r"Python interpreter: [^\]]*", "Python interpreter: /usr/bin/python3", text)

    bodies, made = [], []
    for request in run["requests"]:
        headers = {
            name: neutral(value) for name, value in request["headers"]
            if name in HEADERS or name.startswith(LINEAGE)
        }
        for name in ("authorization", "x-api-key"):
            if name in headers:
                headers[name] = "KEY"
        entry = {
            "method": request["method"],
            "path": neutral(request["path"]).removeprefix("/sessions/SESSION"),
            "headers": {name: value if len(value) < 300 else "<long>" for name, value in headers.items()},
            "status": request["status"],
        }
        if request["body"]:
            body = json.loads(neutral(request["body"]))
            body = {name: field(name, value) for name, value in body.items()}
            fields = []
            before = [earlier for earlier in bodies if earlier]
            for name, value in body.items():
                same = next((n for n, earlier in enumerate(bodies) if earlier and earlier.get(name) == value), None)
                if same is not None and len(json.dumps(value)) > 40:
                    fields.append({"name": name, "kept": same})
                elif isinstance(value, list) and before and isinstance(before[-1].get(name), list):
                    earlier = before[-1][name]
                    count = 0
                    while count < min(len(earlier), len(value)) and earlier[count] == value[count]:
                        count += 1
                    at = max(n for n, body_before in enumerate(bodies) if body_before)
                    fields.append({"name": name, "of": at, "prefix": count, "value": value[count:]})
                else:
                    fields.append({"name": name, "value": value})
            entry["fields"] = fields
            bodies.append(body)
        else:
            bodies.append(None)
        made.append(entry)
    return made


def main():
    with open(sys.argv[1]) as file:
        raw = json.load(file)

    def compact(value):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    runs = []
    for run in raw["runs"]:
        scripts = json.loads(compact(run["scripts"]).replace(run["folders"][0], "/task"))
        lines = ",\n".join("    " + compact(entry) for entry in recorded(run))
        runs.append(
            f'  {{"counts": {compact(run["counts"])},\n   "scripts": {compact(scripts)},\n   "requests": [\n{lines}\n   ]}}'
        )
    with open(sys.argv[2], "w") as file:
        head = {name: raw[name] for name in ("client", "package", "version")}
        file.write(compact(head)[:-1] + ',"runs": [\n' + ",\n".join(runs) + "\n]}\n")


main()
