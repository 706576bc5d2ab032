"""Attestation, engine end: what a worker answers when asked which weights it holds.

- A worker extension of vLLM: its methods are called through /collective_rpc.
- `fingerprints` is what `receiver` recorded in the last update that finished; a failed or unfinished update leaves nothing to attest.
"""

from typing import Any


class AttestingWorker:
    """Mixed into vLLM's worker class by `--worker-extension-cls`."""

    weight_transfer_engine: Any

    def fingerprints(self) -> dict[str, list[str]]:
        """HF name → [fingerprint as 16 hex digits, "resident" | "as_consumed"]; empty before the first update."""
        held = getattr(self.weight_transfer_engine, "held", None) or {}
        return {name: [f"{fingerprint:016x}", how] for name, (fingerprint, how) in held.items()}
