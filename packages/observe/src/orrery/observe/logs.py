"""Logs to stderr, from the level in ORRERY_LOG_LEVEL on (default: `info`)."""

import logging
import os
import sys

from orrery.manifest.errors import OrreryError

LOG_LEVEL = "ORRERY_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
CHATTY = ("httpx", "httpcore", "urllib3", "asyncio")  # one line per request


def log_level() -> str | None:
    """Return the level in ORRERY_LOG_LEVEL, or None if it is unset.

    Raises OrreryError if there is no such level.
    """
    level = os.environ.get(LOG_LEVEL, "").lower()
    if level and level not in LEVELS:
        raise OrreryError(
            f"{LOG_LEVEL}: there is no level {level!r}; choose from {', '.join(LEVELS)}"
        )
    return level or None


def log_to_stderr() -> None:
    """Log to stderr from `info` on, until `set_level`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            "%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_level() -> None:
    """Log from the named level on. Raises OrreryError if there is no such level."""
    if level := log_level():
        logging.getLogger().setLevel(level.upper())
