"""The run's token: the secret that the roles of one attempt share to authenticate messages.

- A role that a launcher started has a token, or ends. A process that a person or a test started may
  have none, and then asks no caller for one.
- The token never goes over HTTP. Requests carry a credential derived from it: one for generation,
  another for administration.
- A generation request passes through a router. Its credential cannot administer an engine.
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
    """The only purpose of a credential."""

    GENERATE = "generate"  # /inference/v1/generate, at an engine or at the router's front
    ADMINISTER = "administer"  # everything else


def credential(token: str, purpose: Purpose) -> str:
    """Return the HMAC-SHA256 of `purpose` under the run's token, in hexadecimal.

    It reveals neither the token nor another credential.
    """
    return hmac.new(token.encode(), f"orrery {purpose}".encode(), "sha256").hexdigest()


def authorization(token: str | None, purpose: Purpose) -> dict[str, str]:
    """Return the HTTP header with a credential, or {} without a token."""
    return {"Authorization": f"Bearer {credential(token, purpose)}"} if token else {}


def derived_key(purpose: str) -> bytes:
    """Return 32 bytes that only holders of the run's token can compute for `purpose`."""
    return hmac.digest(run_token().encode(), purpose.encode(), "sha256")
