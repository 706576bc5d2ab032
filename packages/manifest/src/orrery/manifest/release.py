"""Release: what a manifest can ask of one release of vLLM and not of another. One law, for whoever knows which release it will be.

- `built.check_startable` asks with the release that the locks name for the manifest's hardware, before anything starts.
- An engine asks with the release that it finds installed (`orrery.inference.releases`), which may be another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest

# Engines that share caches share their routes of experts too; a request fails whose cache Mooncake cannot read, and does not hang.
Feature = Literal["routes_in_store", "lost_caches_fail"]


@dataclass(frozen=True)
class Release:
    """A release of vLLM: what sentences call it, and what it has."""

    name: str
    features: tuple[Feature, ...]


LOCKED = {  # by accelerator
    "cpu": Release("vLLM 0.32 (locks/inference.cpu.txt)", get_args(Feature)),
    "h200": Release("vLLM 0.26 (locks/inference.cuda.txt)", ()),
}


def check_release(manifest: Manifest, name: str, has: Callable[[Feature], bool]) -> None:
    """Raises `OrreryError` with one sentence for what this release cannot do and another can; `has` is asked only where it matters."""
    inference = manifest.inference
    if manifest.transport.routed_experts and inference.kv_offload.kind == "mooncake" and not has("routes_in_store"):
        raise OrreryError(
            f"transport.routed_experts with inference.kv_offload.kind 'mooncake': {name} has routes in each engine alone, and caches of "
            f"others are of no use without theirs; set inference.kv_offload.kind to 'tiers', transport.routed_experts to false, or "
            f"install vLLM 0.32"
        )
    if inference.max_restarts and inference.kv_transfer.kind == "mooncake" and not has("lost_caches_fail"):
        raise OrreryError(
            f"inference.max_restarts with inference.kv_transfer.kind 'mooncake': in {name} a request hangs whose cache was "
            f"lost with its engine; set inference.max_restarts to 0, inference.kv_transfer.kind to 'nixl', or install vLLM 0.32"
        )
