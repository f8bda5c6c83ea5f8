"""What the programs in scripts/ share.

It uses only the standard library, so that benchmarks run with the Python of the machine. The package `forebay`, which
starts services as well, needs urllib3.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
FOREBAY = pathlib.Path(os.environ.get("FOREBAY_BIN", TARGET / "release" / "forebay"))
if "FOREBAY_BIN" in os.environ:
    print(f"The program is {FOREBAY} (FOREBAY_BIN).", file=sys.stderr)
