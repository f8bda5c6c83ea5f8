"""Registers the advantage estimator `forebay` wherever verl is imported (the entry point `verl.plugins`).

It runs in every process that imports verl, also in those of people who do not use Forebay, so it must never raise.
"""

from __future__ import annotations

import logging

try:
    from .verl import register

    register()
except Exception as error:
    # The sampler registers it again, and tells the error.
    logging.getLogger("forebay").debug("verl does not know the advantage estimator forebay: %s", error)
