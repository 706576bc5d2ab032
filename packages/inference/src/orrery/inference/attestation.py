"""Attestation, engine end: what a worker answers when asked which weights it holds.

- A worker extension of vLLM: its methods are called through /collective_rpc.
- `update_parts` says what the last update spent its time on.
- `fingerprints` is what `receiver` recorded in the last update that finished; a failed or unfinished update leaves nothing to attest.
- `attested` is the same in one line: a mixture has tens of thousands of tensors, and names are wanted only where something differs.
"""

from collections import Counter
from typing import Any

from orrery.transport.fingerprint import digest


class AttestingWorker:
    """Mixed into vLLM's worker class by `--worker-extension-cls`."""

    weight_transfer_engine: Any

    def fingerprints(self) -> dict[str, list[str]]:
        """HF name → [fingerprint as 16 hex digits, "resident" | "as_consumed"]; empty before the first update."""
        return {name: [f"{fingerprint:016x}", how] for name, (fingerprint, how) in _held(self).items()}

    def attested(self) -> dict[str, Any]:
        """ "digest" of all that is held, and "how" many tensors were attested in which way."""
        held = _held(self)
        fingerprints = {name: fingerprint for name, (fingerprint, _) in held.items()}
        return {"digest": digest(fingerprints), "how": dict(Counter(how for _, how in held.values()))}

    def update_parts(self) -> dict[str, float]:
        """Seconds of the last update in this worker, by part; empty where it read files."""
        parts = getattr(self.weight_transfer_engine, "parts", None)
        return {} if parts is None else {name: round(seconds, 6) for name, seconds in parts.seconds.items()}


def _held(worker: AttestingWorker) -> dict[str, tuple[int, str]]:
    """No method: what an extension has, vLLM's worker must not have."""
    return getattr(worker.weight_transfer_engine, "held", None) or {}
