"""The run's token: the secret that the roles of one attempt share, so that nobody else's message is taken for theirs.

- A role that a launcher started has one, or ends. Only what a person or a test starts may go without, and then asks nobody for it.
- The token itself never goes over HTTP. Requests carry a credential derived from it: one generates, the other administers.
- A request for generation passes a router. What an engine or a router learns from it does not administer another engine.
"""

import hmac
from enum import StrEnum

from orrery.manifest.errors import RunFailed
from orrery.observe.lifeline import WAS_LAUNCHED
from orrery.observe.token import take


def run_token() -> str:
    """Return the token; empty where this process was given none. Raises RunFailed where a launcher started it and gave none."""
    token = take()
    if not token and WAS_LAUNCHED:
        raise RunFailed(
            "the run's token: none came by standard input, though a launcher started this process; without it anybody could pass for a "
            "role of this run; see that whatever starts roles (Slurm, the container) hands standard input on, then run again"
        )
    return token


class Purpose(StrEnum):
    """What a credential is good for, and nothing else."""

    GENERATE = "generate"  # /inference/v1/generate, at an engine or at the router's front
    ADMINISTER = "administer"  # everything else


def credential(token: str, purpose: Purpose) -> str:
    """HMAC-SHA256 of `purpose` under the run's token, in hexadecimal: neither the token nor another credential follows from it."""
    return hmac.new(token.encode(), f"orrery {purpose}".encode(), "sha256").hexdigest()


def authorization(token: str | None, purpose: Purpose) -> dict[str, str]:
    """The header that carries a credential; none where there is no token."""
    return {"Authorization": f"Bearer {credential(token, purpose)}"} if token else {}


def derived_key(purpose: str) -> bytes:
    """32 bytes that only holders of the run's token can compute; different for each `purpose`. The token itself is never sent."""
    return hmac.digest(run_token().encode(), purpose.encode(), "sha256")
