"""The operating system's refusals (`OSError`) in words that say which file, why, and for a full disk what to free."""

import errno


def explain(error: OSError) -> str:
    """`<file>: <the system's word>`."""
    text = error.strerror or f"{type(error).__name__} {error}".strip()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; free some, such as run folders in runs/ that nobody needs (`df -h . /dev/shm` says what is full)"
    return f"{error.filename}: {text}" if error.filename else text
