"""The run's token: the secret that the roles of one attempt share to authenticate messages.

- A role started by a launcher has a token, or ends. A process started by a person or a test may
  have none, and then asks no caller for one.
- The token never goes over HTTP. Requests carry a derived credential: one for generation, another
  for administration.
- A generation request's credential, seen by a router, cannot administer an engine.
"""

import hmac
from enum import StrEnum

from orrery.manifest.errors import RunFailed
from orrery.runtime.parent_watch import WAS_LAUNCHED
from orrery.runtime.token import take


def run_token() -> str:
    """Return the token, or "". Raises RunFailed if a launcher started this process without one."""
    token = take()
    if not token and WAS_LAUNCHED:
        raise RunFailed(
            "the run's token: none came by standard input, though a launcher started this process; "
            "without it anybody could pass for a role of this run; see that whatever starts roles "
            "(Slurm, the container) hands standard input on, then run again"
        )
    return token


class Purpose(StrEnum):
    GENERATE = "generate"  # /inference/v1/generate, at engine or router
    ADMINISTER = "administer"  # all other paths


def credential(token: str, purpose: Purpose) -> str:
    """Return the HMAC-SHA256 of `purpose` under the run's token, in hexadecimal.

    It reveals neither the token nor another credential.
    """
    return hmac.new(token.encode(), f"orrery {purpose}".encode(), "sha256").hexdigest()


def authorization(token: str | None, purpose: Purpose) -> dict[str, str]:
    """Return the HTTP header with a credential, or {} without a token."""
    return {"Authorization": f"Bearer {credential(token, purpose)}"} if token else {}


def derived_key(purpose: str) -> bytes:
    """Return 32 bytes for `purpose` that only the token's holders can compute."""
    return hmac.digest(run_token().encode(), purpose.encode(), "sha256")
