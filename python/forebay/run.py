"""`python -m forebay.run FILE.toml` runs a run file. Programs that it starts call `forebay.run()`."""

from __future__ import annotations

import sys

if __name__ != "__main__":
    # An import would put this module in the place of the function `forebay.run`.
    raise ImportError("forebay.run is a command, `python -m forebay.run`, and a function, `import forebay`")


def _main() -> int:
    from ._runner.command import main

    return main()


sys.exit(_main())
