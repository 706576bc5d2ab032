"""The one exception whose message is meant for the person at the keyboard.

`OrreryError` carries a whole sentence: the field or file, what is wrong with its value, the rule, what to type next.
A command line prints `error: <sentence>` without a traceback and exits with `exit_code`.
"""


class OrreryError(Exception):
    """A mistake that a person can mend; `str(error)` is the sentence they read."""

    exit_code = 2


class RunFailed(OrreryError):
    """The run could not go on (a role died, a deadline passed, weights did not attest); it stays resumable."""

    exit_code = 1
