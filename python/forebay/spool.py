"""`python -m forebay.spool flush DIR`: posts what agents that have ended left in their spool."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from . import errors
from ._spool import Spool
from .client import Client


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, and returns its exit status: 0 if nothing is left and nothing was refused."""
    parser = argparse.ArgumentParser(prog="python -m forebay.spool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    flush = commands.add_parser(
        "flush",
        help="post everything in the folders of processes that have ended",
        description="Posts everything in the folders of processes that have ended, the oldest first. The key is that "
        "of FOREBAY_KEY. Folders of processes that run are left to them.",
    )
    flush.add_argument("folder", metavar="DIR", help="the spool of the agents")
    flush.add_argument("--url", help="the address of the service [default: FOREBAY_URL]")
    flush.add_argument("--all", action="store_true", help="also post what was spooled for another address")
    flush.add_argument("--wait-s", type=float, default=600.0, help="how long to try [default: %(default)s]")
    given = parser.parse_args(arguments)
    if not os.path.isdir(given.folder):
        parser.error(f"{given.folder} is no folder")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        with Client(given.url, spool="") as client:
            spool = Spool(given.folder, client)
            found = spool.adopt(any_service=given.all)
            is_empty = found == 0 or spool.flush(given.wait_s)
            counts = spool.counts
            spool.close(0.0)
    except errors.ConfigurationError as error:
        sys.exit(f"forebay.spool: {error}")
    print(
        f"found {found}, delivered {counts.delivered} ({counts.duplicates} rollouts were there, {counts.late} late), "
        f"rejected {counts.rejected}, left {counts.waiting}"
    )
    return 0 if is_empty and counts.rejected == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
