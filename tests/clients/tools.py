"""The two tools of the clients that bring none of their own, and how each client is started.

A client is started with a base URL, a key, the name of a model and a task, in the folder of the task.
"""
import json
import pathlib
import subprocess
import sys


def arguments():
    """Base URL, key, model and task."""
    return sys.argv[1:5]


def write_file(path: str, text: str) -> str:
    """Writes a file.

    Args:
        path: The path of the file.
        text: What the file contains afterwards.
    """
    pathlib.Path(path).write_text(text)
    return f"{path} is written"


def run(command: str) -> str:
    """Runs a command and returns its output.

    Args:
        command: The command line.
    """
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return f"{done.stdout}exit status {done.returncode}"


def call(name, text):
    """Runs a tool by its name, with its arguments as JSON text."""
    return {"write_file": write_file, "run": run}[name](**json.loads(text))


SCHEMAS = {
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
    "run": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
DESCRIPTIONS = {"write_file": "Writes a file.", "run": "Runs a command and returns its output."}
