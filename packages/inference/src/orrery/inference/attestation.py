"""Attestation, engine end: what a worker answers when asked which weights it holds.

- A worker extension of vLLM: its methods are called through /collective_rpc, and every worker of an engine answers.
- `untaken` and `give_up_update` come between loading and finishing: an engine has taken a version when each of its workers has.
- It is the one extension that vLLM takes, so what a worker does about other engines comes with it (`kv_peers`).
- `update_parts` says what the last update spent its time on.
- `fingerprints` is what `receiver` recorded in the last update that finished; a failed or unfinished update leaves nothing to attest.
- `attested` is the same in one line: a mixture has tens of thousands of tensors, and names are wanted only where something differs.
"""

from collections import Counter
from typing import Any

from orrery.inference.kv_peers import KvPeers
from orrery.transport.fingerprint import digest


class AttestingWorker(KvPeers):
    """Mixed into vLLM's worker class by `--worker-extension-cls`."""

    weight_transfer_engine: Any
    finish_weight_update: Any

    def untaken(self) -> str | None:
        """Why this worker has not taken the version that the update under way brings; None where it has."""
        failure: str | None = self.weight_transfer_engine.failure
        return failure

    def give_up_update(self) -> None:
        """The update under way is over, here or in another worker without its version: nothing is held, and another may begin."""
        self.weight_transfer_engine.failure = (
            self.untaken() or "another worker of this engine has not taken it"
        )
        self.finish_weight_update()

    def fingerprints(self) -> dict[str, list[str]]:
        """HF name → [fingerprint as 16 hex digits, "resident" | "as_consumed"]; empty before the first update."""
        return {
            name: [f"{fingerprint:016x}", how] for name, (fingerprint, how) in _held(self).items()
        }

    def attested(self) -> dict[str, Any]:
        """ "digest" of all that is held, and "how" many tensors were attested in which way."""
        held = _held(self)
        fingerprints = {name: fingerprint for name, (fingerprint, _) in held.items()}
        return {
            "digest": digest(fingerprints),
            "how": dict(Counter(how for _, how in held.values())),
        }

    def update_parts(self) -> dict[str, float]:
        """Seconds of the last update in this worker, by part; empty where it read files."""
        parts = getattr(self.weight_transfer_engine, "parts", None)
        return (
            {}
            if parts is None
            else {name: round(seconds, 6) for name, seconds in parts.seconds.items()}
        )


def _held(worker: AttestingWorker) -> dict[str, tuple[int, str]]:
    """No method: what an extension has, vLLM's worker must not have."""
    return getattr(worker.weight_transfer_engine, "held", None) or {}
