"""What differs between the releases of vLLM that Orrery runs: 0.26 (torch 2.11) and 0.32 (torch 2.13). No other file asks which it is.

| | 0.26 | 0.32 |
|---|---|---|
| the API server's pieces | in `vllm.entrypoints.openai` | in `vllm.entrypoints.launchers` |
| SIGTERM | uvicorn replaces vLLM's handler: `patches.vllm_0_26` | vLLM keeps uvicorn from it |
| workers of an engine | meet on every interface: `patches.vllm_0_26` | meet by a file |
| data-parallel ranks, where they meet | on every interface: `patches.vllm_data_parallel` | the same |
| versions of tokens | none: `patches.vllm_0_26` | `weight_versions` in every answer, `weight_version` in every core's output |
| an answer's class | `GenerateResponse` | `GenerateResponseBase` |
| data-parallel ranks | sample alike: `vllm_0_26_worker`; rank 0 alone answers: `vllm_data_parallel` | rank 0 alone answers: the same |
| routed experts | by place; beside a KV connector by `vllm_0_26_routes` | in a store; the same by `vllm_routes_elsewhere` |
| routed experts on GPU | Model Runner V1 | Model Runner V2 |
| torch's compiler, as it is imported | needed | left out where nothing is compiled |
| routed experts on CPU | `patches.vllm_0_26_routes` | `patches.vllm_routes` |
| a cache that Mooncake cannot read | its request hangs: not beside restarts | fails its request |
| tiers, of a request that was aborted | end the engine: `patches.vllm_0_26` | store what was computed |
| a task of the disk tier | begins with its path | begins with its paths |
| the disk tier, of a load that failed | all of it | but for `successful_keys` |
| adapters, after an update | stay | are removed: `patches.vllm_adapters`, which both have for empty steps of data-parallel ranks |

- `patches/` named for one release are part of this file: they are called from here alone. Where one release has a field more and nothing
  but its default follows from that, who reads it says the default, and `transport.engine`, which knows no vLLM, sends both spellings.
- A release is known by what it has, not by its number: a release between the two, or somebody's build of one, is read right too.
- What a manifest cannot ask of one of them is the law of `orrery.manifest.release`, which `orrery check` asks of the locked ones.
- `test_inference_releases.py` holds the names and flags of this package against the installed release, and against the source of
  another where ORRERY_VLLM_SOURCE names its folder.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orrery.inference.patches.vllm_routes_elsewhere import KEPT
from orrery.manifest.errors import OrreryError
from orrery.manifest.release import Feature, check_release
from orrery.manifest.schema import Manifest

LAUNCHERS = "entrypoints/launchers/api_server/entry.py"
ENGINE_OUTPUTS = "v1/engine/__init__.py"
AUX_OUTPUT = "distributed/aux_output_connector/worker.py"
MOONCAKE = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
FEATURES: dict[Feature, tuple[str, ...]] = {"routes_in_store": (AUX_OUTPUT,), "lost_caches_fail": (MOONCAKE, "_handle_failed_recv")}


@dataclass(frozen=True)
class ApiServer:
    """The pieces of vLLM's `run_server`, by the names that both releases give them."""

    make_arg_parser: Callable[..., Any]
    validate_parsed_serve_args: Callable[..., Any]
    setup_server: Callable[..., Any]
    build_async_engine_client: Callable[..., Any]
    build_and_serve: Callable[..., Any]


def api_server() -> ApiServer:
    """Imports vLLM."""
    if _has(LAUNCHERS):
        from vllm.entrypoints.launchers.api_server import entry
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    else:
        from vllm.entrypoints.openai import api_server as entry
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    return ApiServer(
        make_arg_parser, validate_parsed_serve_args, entry.setup_server, entry.build_async_engine_client, entry.build_and_serve
    )


def arguments(manifest: Manifest) -> dict[str, str]:
    """Flags that one release needs and the other does not. Raises OrreryError for what the installed one cannot do and another can."""
    check_release(manifest, "this release of vLLM", lambda feature: _has(*FEATURES[feature]))
    if manifest.inference.data_parallel > 1 and not _has(LAUNCHERS):
        return {"--worker-cls": "orrery.inference.patches.vllm_0_26_worker.SeededWorker"}
    return {}


def environment(manifest: Manifest) -> dict[str, str]:
    """Variables that one release needs and the other does not; they are read as vLLM is imported."""
    if manifest.transport.routed_experts and manifest.hardware.accelerator != "cpu" and _has(AUX_OUTPUT):
        return {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # else vLLM may choose the other runner, and refuse to start with it
    return {}


def import_vllm(manifest: Manifest) -> None:
    """Import vLLM, without torch's compiler where nothing is compiled and the release can do without: 0.26 imports it whole."""
    if manifest.inference.enforce_eager and _has(LAUNCHERS):
        from orrery.inference.patches.vllm import import_without_compiler

        import_without_compiler()


def correct(manifest: Manifest) -> None:
    """Apply the corrections that this release needs, in the process that becomes the API server and before vLLM reads its arguments."""
    if manifest.hardware.accelerator == "cpu":
        from orrery.inference.patches import vllm, vllm_adapters, vllm_routes

        vllm.fork_engine_core()
        vllm.inspect_models_here()
        vllm.draw_again_after_a_part()
        if manifest.transport.routed_experts and _has(AUX_OUTPUT):
            vllm_routes.routes_on_cpu()
        elif manifest.transport.routed_experts:
            from orrery.inference.patches import vllm_0_26_routes

            vllm_0_26_routes.capture_on_cpu()
        if manifest.transport.weights == "adapters":
            vllm_adapters.keep_kernels_of_experts()
    if not _has(LAUNCHERS):
        from orrery.inference.patches import vllm_0_26

        vllm_0_26.keep_signal_handlers()
        vllm_0_26.keep_account()
    from orrery.inference.patches import vllm_answers

    vllm_answers.write_answers(_class_of_answers())
    if manifest.inference.data_parallel > 1:
        from orrery.inference.patches import vllm_data_parallel

        vllm_data_parallel.answer_for_every_rank()


def _class_of_answers() -> Any:
    """What the endpoint of `patches.vllm_answers` knows an answer by."""
    if _has(LAUNCHERS):
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponseBase as Answer
    else:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse as Answer
    return Answer


def outputs_name_weights() -> bool:
    """Whether what an engine core sends says which weights it was sampled by."""
    return _has(ENGINE_OUTPUTS, "weight_version")


def correct_engine() -> None:
    """Apply the corrections that this release needs in each process of an engine."""
    if not _has(LAUNCHERS):
        from orrery.inference.patches import vllm_0_26

        vllm_0_26.meet_by_file()
    from orrery.inference.patches import vllm_data_parallel

    vllm_data_parallel.meet_at_one_address()
    if not _has(AUX_OUTPUT):
        from orrery.inference.patches import vllm_0_26_routes

        vllm_0_26_routes.list_blocks_of_prompts()
    if KEPT not in os.environ:
        return
    if _has(AUX_OUTPUT):
        from orrery.inference.patches import vllm_routes_elsewhere

        vllm_routes_elsewhere.keep()
        vllm_routes_elsewhere.beside_transfer()
    else:
        from orrery.inference.patches import vllm_0_26_routes

        vllm_0_26_routes.keep()
        vllm_0_26_routes.beside_connectors()


def correct_tiers() -> None:
    """Apply the corrections that tiers of this release need, before they are made."""
    if not _has(LAUNCHERS):
        from orrery.inference.patches import vllm_0_26

        vllm_0_26.store_nothing_of_the_ended()


def paths_stored(task: Any) -> Sequence[str]:
    """The files that a task of the disk tier writes; a task is a `functools.partial`."""
    paths = task.args[0]
    return [paths] if isinstance(paths, str) else paths


def keys_loaded(result: Any) -> Collection[Any]:
    """The blocks that a load of the disk tier has brought although it failed, where the release tells."""
    return getattr(result, "successful_keys", None) or ()


def _has(file: str, name: str = "") -> bool:
    """Whether the installed vLLM has this file, and the name in it; vLLM is not imported."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise OrreryError("inference: vLLM is not installed here; install locks/inference.cuda.txt (GPU) or locks/inference.cpu.txt")
    path = Path(found.submodule_search_locations[0]) / file
    return path.is_file() and (not name or name in path.read_text())
