"""Pass an attempt's secret token from the launcher to roles, and authenticate callers with it.

- Environment variables and arguments never contain the token.
- ORRERY_TOKEN_FILE is `-` for standard input, or a file, such as a Kubernetes secret.
- A process with the token hides its memory.
- Each request carries a credential for one `Purpose`, derived from the token.
"""

import hmac
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.runtime.process_control import WAS_LAUNCHED, hide_memory
from orrery.runtime.timing import scaled

TOKEN_FILE = "ORRERY_TOKEN_FILE"
STANDARD_INPUT = "-"
MAX_BYTES = 256
TAKE_S = 60.0  # time limit to receive the token through srun

_kept = ""


@contextmanager
def handed_over(token: str) -> Iterator[int]:
    reader, writer = os.pipe()
    try:
        os.write(writer, f"{token}\n".encode())
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def take() -> str:
    """Return this process's token, or "" without ORRERY_TOKEN_FILE. The first call reads it.

    Raise OrreryError if the file is unreadable, or no token arrives within TAKE_S.
    """
    global _kept
    place = os.environ.pop(TOKEN_FILE, "")
    if place:
        hide_memory()
        _kept = _from_standard_input() if place == STANDARD_INPUT else _from_file(place)
    return _kept


def _from_standard_input() -> str:
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < MAX_BYTES:
            if not select.select([0], [], [], scaled(TAKE_S))[0]:
                raise OrreryError(
                    f"{TOKEN_FILE}: no token arrived on standard input in {scaled(TAKE_S):g} s; "
                    "check that srun passes on standard input"
                )
            more = os.read(0, MAX_BYTES - len(line))
            if not more:
                break
            line += more
    finally:
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
    return line.decode(errors="replace").strip()


def _from_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise OrreryError(
            f"{TOKEN_FILE}: {path} cannot be read ({error.strerror}); name a file that holds the "
            "run's token"
        ) from error


# Credentials


def run_token() -> str:
    """Return the token, or "" without a launcher. Raise RunFailed if the launcher gave none."""
    token = take()
    if not token and WAS_LAUNCHED:
        raise RunFailed(
            "the run's token: a launcher started this process without the token on standard input; "
            "without it, any program could act as a role of this run; make Slurm or the container "
            "pass on standard input, then run again"
        )
    return token


class Purpose(StrEnum):
    GENERATE = "generate"  # permits /inference/v1/generate
    ADMINISTER = "administer"  # permits all other paths


def credential(token: str, purpose: Purpose) -> str:
    return hmac.new(token.encode(), f"orrery {purpose}".encode(), "sha256").hexdigest()


def authorization(token: str | None, purpose: Purpose) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential(token, purpose)}"} if token else {}


def derived_key(purpose: str) -> bytes:
    """Return a 32-byte key for `purpose`, computable only with the token."""
    return hmac.digest(run_token().encode(), purpose.encode(), "sha256")
