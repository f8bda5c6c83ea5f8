"""Starts the program in the place of this process, with the libraries of the installed `torch`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the program."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit("forebay-trainer: the package torch is not installed, whose libtorch it uses")
    libraries = str(Path(found.origin).parent / "lib")
    earlier = os.environ.get("LD_LIBRARY_PATH")
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [libraries, earlier]))}
    program = Path(__file__).with_name("forebay-trainer")
    os.execve(program, [str(program), *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
