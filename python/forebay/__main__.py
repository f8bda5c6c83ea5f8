"""`python -m forebay` is the `forebay` program."""

from __future__ import annotations

import os
import sys

from .errors import ConfigurationError
from .server import find_binary


def main() -> None:
    """Becomes the program, with the arguments of the command line."""
    try:
        binary = find_binary()
    except ConfigurationError as error:
        sys.exit(f"forebay: {error}")
    os.execv(binary, [binary, *sys.argv[1:]])


if __name__ == "__main__":
    main()
