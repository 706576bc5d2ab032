"""What every weight wire says of a version; `weight_wire/__init__.py` has the protocol in words."""

from pathlib import Path

import msgspec

from orrery.manifest.errors import RunFailed


class WireFailed(RunFailed):
    """Weights did not travel; the sentence names the take, who was waited for, or the tensor."""


ELSEWHERE = "failed elsewhere"
GONE = "can no longer be had"  # of a version: the trainer has sent it, and stepped since
ROUND_S = (
    60.0  # for one round; a bucket takes milliseconds, the rest is patience with a busy machine
)


class TakeFailed(WireFailed):
    """A take came to nothing for this end by another's doing: the same again, without whoever was lost, may succeed.

    A worker of an engine passes on nothing but its sentence, so the sentence says so too (`ELSEWHERE`).
    """

    def __init__(self, take: int, why: object) -> None:
        super().__init__(f"take {take} {ELSEWHERE}: {why}")


class Published(msgspec.Struct, frozen=True):
    """A readable policy version.

    - `fingerprints`: by Hugging Face tensor name. `digest` is the hash of all of them.
    - `canary`: the trainer's log-probs of the canary's tokens after the first. It is empty if the
      publisher is not a trainer.
    """

    version: int
    path: str
    fingerprints: dict[str, int]
    digest: str
    canary: tuple[float, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.path)
