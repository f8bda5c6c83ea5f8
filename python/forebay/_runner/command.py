"""The command line of the runner."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import ForebayError
from . import compose, held_out, programs, roles, settings
from .output import Output
from .processes import RunFailed
from .program import read_data
from .progress import table
from .settings import Settings
from .stages import Chaos, Result, Runner

KINDS = ("service", "engine", "trainer", "agent")

STOPPED = 130
"""The exit status after Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a run file, once for each seed. Returns 0 if all runs passed."""
    parser = command_line()
    options = parser.parse_args(arguments)
    _check(parser, options)
    signal.signal(signal.SIGTERM, _interrupt)
    results: list[Result] = []
    try:
        if options.written_as is not None:
            return _write(options)
        if options.only is not None:
            return _only(options)
        for seed in options.seeds or [options.seed]:
            results.append(_run(options, seed))
    except KeyboardInterrupt:
        print("forebay.run: stopped; --resume goes on", file=sys.stderr)
        return STOPPED
    except ForebayError as error:
        print(f"forebay.run: {error}", file=sys.stderr)
        return 1
    passed = sum(result.passed for result in results)
    if len(results) > 1:
        print(f"{passed} of {len(results)} seeds passed", flush=True)
    return 0 if passed == len(results) else 1


def command_line() -> argparse.ArgumentParser:
    """The options of `python -m forebay.run`."""
    parser = argparse.ArgumentParser(
        prog="python -m forebay.run",
        description="Runs everything of one training on this machine: the service, engines, trainers and a program.",
        epilog="Exit status 0: every criterion of [[pass]] holds. Programs are found by FOREBAY_BIN, "
        "FOREBAY_TRAINER_BIN and the PATH.",
    )
    parser.add_argument("file", type=Path, help="the run file (TOML)")
    parser.add_argument("--profile", help="a [profile.NAME] of the run file, which is merged into it")
    parser.add_argument("--seed", type=int, help="instead of the seed of the run file")
    parser.add_argument("--seeds", type=_numbers, help="several runs, one after the other: 1,2,3")
    parser.add_argument("--minutes", type=float, help="instead of the time limit of the run file")
    parser.add_argument("--out", type=Path, help="folder of all files (default: data/runs/NAME-SEED)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in this folder")
    parser.add_argument(
        "--keep-serving", action="store_true", help="keep the page of the service open after the run, until Ctrl-C"
    )
    parser.add_argument("--engine", metavar="URL", help="use an engine that runs at this address, and start none")
    parser.add_argument(
        "--chaos", type=_chaos, metavar="KIND:SECONDS",
        help=f"kill -9 a process of a kind ({', '.join(KINDS)}) every so many seconds",
    )  # fmt: skip
    elsewhere = parser.add_argument_group("beyond this machine")
    elsewhere.add_argument(
        "--as", dest="written_as", choices=("compose",), help="print the run as a compose file, and run nothing"
    )
    elsewhere.add_argument("-o", dest="to", type=Path, metavar="FILE", help="write it to this file")
    elsewhere.add_argument(
        "--only", choices=roles.ROLES,
        help="do one part of a run whose service, engines and trainers something else starts; their addresses are in "
        "FOREBAY_URL and FOREBAY_ENGINES: what comes before trainers start; a process of the program; the judging",
    )  # fmt: skip
    return parser


WITHOUT = {
    "written_as": ("seeds", "out", "resume", "chaos", "only", "keep_serving"),
    "only": ("seeds", "resume", "chaos", "engine", "keep_serving"),
    "seeds": ("keep_serving",),
}
"""Options that have no meaning beside another one."""


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for option, others in WITHOUT.items():
        for other in others:
            if getattr(options, option) and getattr(options, other):
                names = [name.removeprefix("written_").replace("_", "-") for name in (option, other)]
                parser.error(f"--{names[0]} and --{names[1]} cannot be used together")
    if options.to is not None and options.written_as is None:
        parser.error("-o is the file of --as")


def _write(options: argparse.Namespace) -> int:
    found = settings.read(options.file, profile=options.profile, seed=options.seed)
    _override(found, options)
    here = Path.cwd()
    base: Path = here if options.to is None else (here / options.to).parent
    text = compose.written(found, profile=options.profile, here=here, base=base)
    if options.to is None:
        print(text, end="")
    else:
        options.to.write_text(text)
    return 0


def _only(options: argparse.Namespace) -> int:
    found = settings.read(options.file, profile=options.profile, seed=options.seed)
    _override(found, options)
    output = roles.opened(_folder(found, options), _identity(found, options), options.only)
    say = _sayer(output)
    try:
        if options.only == "prepare":
            roles.prepare(found, output, say)
            return 0
        if options.only == "agent":
            roles.agent(found, output, options.profile)
        result = roles.watch(found, output, say)
    finally:
        output.close()
    _print(result)
    return 0 if result.passed else 1


def _folder(found: Settings, options: argparse.Namespace) -> Path:
    return options.out or Path("data") / "runs" / f"{found.name}-{found.seed}"


def _identity(found: Settings, options: argparse.Namespace) -> dict[str, Any]:
    return {"file": str(options.file.resolve()), "profile": options.profile, "seed": found.seed}


def _sayer(output: Output) -> Callable[[str], None]:
    """Prints lines with their time, and writes them to the log of the run."""
    started = time.monotonic()

    def say(text: str) -> None:
        line = f"{time.monotonic() - started:6.0f} s  {text}"
        print(line, flush=True)
        with (output.folder / "run.log").open("a") as log:
            log.write(line + "\n")

    return say


def _run(options: argparse.Namespace, seed: int | None) -> Result:
    found = settings.read(options.file, profile=options.profile, seed=seed)
    _override(found, options)
    if found.task.data is not None:
        # Read here as well: the program's errors are only in its log.
        read_data(found.task)
    folder = _folder(found, options)
    if options.out and options.seeds:
        folder = folder / f"{found.name}-{found.seed}"
    output = Output(folder, _identity(found, options), resume=options.resume)
    say = _sayer(output)
    try:
        say(f"{found.name}, seed {found.seed}{', goes on' if output.is_resumed else ''}")
        runner = Runner(found, output, say, profile=options.profile, chaos=options.chaos)
        result = runner.run(_print, keep_serving=options.keep_serving)
    finally:
        output.close()
    if found.url is None:
        command = programs.serve_again(found, output)
        print(f"to look at its page again: {command}", flush=True)
    return result


def _print(result: Result) -> None:
    steps = ", ".join(f"{name} {count}" for name, count in result.steps.items())
    print(f"{result.name}, seed {result.seed}: steps {steps}; {result.minutes:.1f} minutes", flush=True)
    if result.judged:
        print(table(result.judged), flush=True)
    if result.held_out:
        print(held_out.table(result.held_out), flush=True)


def _override(found: Settings, options: argparse.Namespace) -> None:
    if options.minutes is not None:
        found.minutes = options.minutes
    if options.engine is not None:
        if len(found.engines) != 1:
            raise RunFailed(f"--engine replaces the only engine of a run file, and this one has {len(found.engines)}")
        found.engines[0].urls.append(options.engine)


def _chaos(text: str) -> Chaos:
    kind, _, seconds = text.partition(":")
    try:
        every_s = float(seconds or "30")
    except ValueError:
        every_s = 0.0
    if kind not in KINDS or every_s <= 0:
        raise argparse.ArgumentTypeError(f"must be KIND:SECONDS, with one of {', '.join(KINDS)}")
    return Chaos(kind=kind, every_s=every_s)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("must be numbers with commas between them: 1,2,3") from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
