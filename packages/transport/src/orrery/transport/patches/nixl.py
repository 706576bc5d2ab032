"""Correction to NIXL's Python API: its progress thread waits.

Upstream: `nixl_agent` sets `pthrDelay`, for how long the progress thread waits for UCX to wake it, to 0 and lets nobody say another: the
thread asks again and again, and every idle process with an agent uses a whole core. Where a GPU computes that costs little and saves
microseconds; on CPU it is a core that computes.
Versions: 1.5.1 (seen). Remove when `nixl_agent_config` takes the delay.
"""

from typing import Any

PROGRESS_US = 20_000  # between two looks where nothing wakes it; what arrives does


def wait_for_progress() -> None:
    """In a process on CPU that makes agents, before it makes one. Raises ImportError where NIXL is not installed."""
    import nixl._api

    bindings: Any = nixl._api.nixlBind
    config = bindings.nixlAgentConfig
    if hasattr(config, "orrery"):
        return

    class WaitingConfig(config):  # type: ignore[misc, valid-type]
        orrery = True

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = WaitingConfig
