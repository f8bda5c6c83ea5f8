"""Stands for `forebay-trainer` in tests of the runner: it trains nothing, and has the trainer's files and calls."""

from __future__ import annotations

import argparse
import http.server
import json
from pathlib import Path

import forebay
from forebay._runner.tables import load


def init(options: argparse.Namespace) -> None:
    assert options.chat and len(set(options.alphabet)) == len(options.alphabet)
    options.folder.mkdir()
    (options.folder / "alphabet").write_text(options.alphabet)


def train(options: argparse.Namespace) -> None:
    config = load(options.config)
    assert Path(config["model"]).is_dir()
    output = Path(config["output"])
    output.mkdir(parents=True, exist_ok=True)
    metrics = output / "metrics.jsonl"
    step = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    client = forebay.Client(config["server"])
    with forebay.Trainer(config["policy"], last_saved=step or None, client=client, force=True) as run:
        if run.version == 0:
            run.publish(0, uri=output.as_uri())
        if step >= config["steps"]:
            return
        for batch in run:
            rewards = [row.reward for row in batch.rows()]
            step += 1
            report = {
                "step": step,
                "version": run.version,
                "reward_all": sum(rewards) / len(rewards),
                "staleness_mean": 0.0,
                "waiting_share": 0.5,
            }
            with metrics.open("a") as file:
                file.write(json.dumps(report) + "\n")
            batch.ack(step)
            run.saved(step)
            run.publish(step, uri=output.as_uri())
            if step >= config["steps"]:
                return


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def serve(options: argparse.Namespace) -> None:
    host, _, port = options.listen.rpartition(":")
    http.server.HTTPServer((host, int(port)), Health).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for function in (init, train, serve):
        command = commands.add_parser(function.__name__)
        command.set_defaults(run=function)
        if function is init:
            command.add_argument("folder", type=Path)
            command.add_argument("--alphabet", required=True)
            command.add_argument("--chat", action="store_true")
            for name in ("seed", "hidden", "layers", "heads"):
                command.add_argument(f"--{name}")
        elif function is train:
            command.add_argument("--config", type=Path)
        else:
            command.add_argument("models", nargs="*")
            command.add_argument("--listen")
            command.add_argument("--threads")
            command.add_argument("--follow", action="append")
    options = parser.parse_args()
    options.run(options)


main()
