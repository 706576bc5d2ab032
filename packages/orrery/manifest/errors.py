"""Errors that commands print as `error: <message>` before they exit with `exit_code`.

A message names field or file, value, rule and remedy.
"""

import errno


class OrreryError(Exception):
    """A mistake that the user can correct."""

    exit_code = 2


class RunFailed(OrreryError):
    """The run ended early and can be resumed."""

    exit_code = 1


class OutOfMemory(RunFailed):
    """A process lacks memory. The message names a field and a value that fits."""

    exit_code = 3


def explain_os_error(error: OSError) -> str:
    """Return `<file>: <reason>`, with a remedy for a full disk."""
    text = error.strerror or f"{type(error).__name__} {error}".strip()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += (
            "; free some space, such as unused folders in runs/ (`df -h . /dev/shm` shows the full "
            "disk)"
        )
    return f"{error.filename}: {text}" if error.filename else text
