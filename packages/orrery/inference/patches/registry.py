"""List and apply the patches of vLLM.

`python -m orrery.inference.patches.registry` prints a JSON line per patch.
"""

import json
import os
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest

TESTS = "tests/inference"
ROUTE_IN_FLOAT32 = "ORRERY_ROUTE_IN_FLOAT32"
# Environment variable: size factor of vLLM's route store.
KEPT = "ORRERY_ROUTES_KEPT"
# Environment variable: positions in the bit mask of chosen keys, or 0 for a sample of keys.
CHOICE_TOKENS = "ORRERY_CHOICE_TOKENS"


class Patch(NamedTuple):
    name: str  # module.function in `inference/patches`
    target: str
    why: str
    until: str  # condition for removal
    test: str  # must pass without the patch once `until` is true
    upstream: str = ""
    versions: str = "0.32"


PATCHES = (
    Patch(
        "vllm.import_without_compiler",
        "vllm.env_override",
        "vLLM needlessly imports torch's compiler, which takes a fifth of the start-up",
        "vLLM patches the compiler only when a model is compiled",
        "test_inference_assemble.py",
    ),
    Patch(
        "vllm.fork_engine_core",
        "CpuPlatform.check_and_update_config",
        "vLLM on CPU spawns the engine core, which imports torch and vLLM again",
        "the platform keeps a VLLM_WORKER_MULTIPROC_METHOD that is already set",
        "test_inference_engine.py",
    ),
    Patch(
        "vllm.inspect_models_here",
        "models.registry._run_in_subprocess",
        "vLLM inspects model classes in a subprocess, which imports torch once more",
        "the registry needs no subprocess on CPU",
        "test_inference_engine.py",
    ),
    Patch(
        "vllm.forget_moe_kernels",
        "UnquantizedFusedMoEMethod._setup_kernel",
        "a reload on CPU keeps the experts' old packed weights, so log-probs are silently wrong",
        "weight updates prepack too",
        "test_inference_router.py",
        "vllm-project/vllm#40390",
    ),
    Patch(
        "vllm.sleep_for_messages",
        "shm_broadcast.sched_yield",
        "each tensor-parallel worker uses a whole CPU core for a second after every message",
        "workers on CPU wait without spinning",
        "test_inference_wide_engine.py",
    ),
    Patch(
        "vllm.repack_tied_heads",
        "ParallelLMHead",
        "a reload on CPU keeps a tied head's old packed weights, so log-probs are silently wrong",
        "a reload processes tied heads",
        "test_inference_engine.py",
    ),
    Patch(
        "vllm.say_nothing_of_unloaded",
        "reload.layerwise",
        "a reload warns of layers that have no weights to load",
        "vLLM does not warn of such layers",
        "test_inference_engine.py",
    ),
    Patch(
        "vllm.say_nothing_of_rounding",
        "model_executor.models.utils",
        "loading warns of each float32 tensor, and trainers save float32 weights",
        "vLLM warns once of all rounded tensors",
        "test_inference_loading.py",
    ),
    Patch(
        "vllm.draw_again_after_a_part",
        "CPUModelRunner._sample and _bookkeeping_sync",
        "a seeded request with chunked prefill ends the engine: CPU generators have no offset",
        "vLLM restores the generator's state",
        "test_inference_engine.py",
    ),
    Patch(
        "vllm.route_in_float32",
        "GateLinear.__init__",
        "models that round router logits to bfloat16 choose other experts than the trainer",
        "an option sets the dtype of router logits for all models",
        "test_inference_fp8.py",
    ),
    Patch(
        "vllm.keep_adapters",
        "LoRAModelManager.remove_all_adapters",
        "weight updates and empty data-parallel steps remove the adapter, and the next request"
        " loads the first version of the adapter from disk",
        "an update can keep adapters, and an empty step removes no adapter of requests",
        "test_inference_adapters.py",
    ),
    Patch(
        "vllm.keep_kernels_of_experts",
        "FusedMoEConfig.is_lora_enabled",
        "experts get LoRA kernels even if no adapter targets experts; these kernels need a GPU",
        "is_lora_enabled follows --lora-target-modules",
        "test_inference_adapters.py",
    ),
    Patch(
        "vllm_answers.write_answers",
        "ServingTokens.serve_tokens_full_generator",
        "vLLM makes two pydantic models of every token's log-prob when a request ends",
        "vLLM encodes these answers without a pydantic model for each token",
        "test_inference_whole_answers.py",
    ),
    Patch(
        "vllm_answers.stream_samples",
        "ParentRequest.get_outputs",
        "a request for n samples is answered when the last sample ends, or token by token",
        "a stream can send each sample once, when it ends",
        "test_inference_whole_answers.py",
    ),
    Patch(
        "vllm_answers.hold_outputs",
        "EngineCore.step",
        "the engine core sends every token alone, which takes longer than a GPU step",
        "the engine core has a --stream-interval, as the API server has",
        "test_inference_whole_answers.py",
        "vllm-project/vllm#27869",
    ),
    Patch(
        "vllm.exchange_unequal_parts",
        "CpuCommunicator.all_gatherv, .reduce_scatterv",
        "data-parallel ranks on CPU cannot exchange tokens for experts: NotImplementedError",
        "vLLM's CPU communicator has these collectives",
        "test_inference_expert_parallel.py",
    ),
    Patch(
        "vllm.compute_own_experts",
        "CPUUnquantizedExperts.apply",
        "experts on CPU ignore the expert map, so an expert of another rank ends the engine",
        "the kernel takes the expert map",
        "test_inference_expert_parallel.py",
    ),
    Patch(
        "vllm.answer_for_every_rank",
        "DPLBAsyncMPClient.collective_rpc_async",
        "/collective_rpc returns data-parallel rank 0's result only, so other ranks are unattested",
        "collective_rpc returns the results of all ranks",
        "test_inference_wide_engine.py",
    ),
    Patch(
        "vllm.meet_at_one_address",
        "vllm.distributed.utils.TCPStore",
        "the ranks' TCPStore has no token and listens on every interface",
        "vLLM always gives the store a socket that is bound to one host",
        "test_inference_wide_engine.py",
        "vllm-project/vllm#52638",
    ),
    Patch(
        "vllm.name_shared_memory",
        "_CPUSHMDistributed.make_group_name",
        "shared memory has random names, so memory that a killed process leaves cannot be found",
        "vLLM takes the names from its caller",
        "test_inference_server.py",
    ),
    Patch(
        "vllm.unlink_host_tiers",
        "SharedOffloadRegion",
        "a killed engine leaves its host tier, a file in shared memory",
        "TieringOffloadingSpec has a barrier, as CPUOffloadingSpec does",
        "test_inference_kv_offload.py",
    ),
    Patch(
        "vllm.pause_beside_unread_blocks",
        "Scheduler.has_finished_requests",
        "a pause waits for other engines to read KV blocks, but they pause too, until leases end",
        'a "keep" pause returns at once with unread blocks',
        "test_inference_prefill_decode.py",
        "vllm-project/vllm#58041",
    ),
    Patch(
        "vllm.bootstrap_on_one_address",
        "MooncakeBootstrapServer",
        "Mooncake's bootstrap server listens on 0.0.0.0",
        "the bootstrap server listens on VLLM_HOST_IP",
        "test_inference_prefill_decode.py",
    ),
    Patch(
        "vllm.device_index_on_cpu",
        "MooncakeConnectorWorker.__init__",
        "Mooncake's worker asks torch.accelerator for the current device, which raises on CPU",
        "the worker asks vLLM's platform",
        "test_inference_prefill_decode.py",
    ),
    Patch(
        "vllm.nixl_that_waits",
        "nixl_utils._load_nixl_attr",
        "NIXL's progress thread never sleeps (orrery.wire.weight_wire.links)",
        "`wait_for_progress` in the weight wire is removed",
        "test_inference_prefill_decode.py",
    ),
    Patch(
        "vllm.pulls_that_end_with_their_engine",
        "MooncakeConnectorWorker.receive_kv_from_single_worker",
        "a read from a dead engine hangs until after the lease, and holds its blocks",
        "vLLM fails reads from a dead producer",
        "test_inference_prefill_decode.py",
        "vllm-project/vllm#35943",
    ),
    Patch(
        "vllm_routes.routes_on_cpu",
        "VllmConfig._verify_aux_output_compatibility",
        "only Model Runner V2 returns routed experts, and it needs Triton, hence a GPU",
        "a CPU engine starts with --enable-return-routed-experts",
        "test_inference_routes.py",
    ),
    Patch(
        "vllm_routes.keep",
        "aux_output_connector.BlockObjectStore",
        "routes are lost when a block leaves the device, and loading it back crashes the engine",
        "vLLM's route store keeps routes as long as the tiers keep blocks",
        "test_inference_kv_offload.py",
        "vllm-project/vllm#56402",
    ),
    Patch(
        "vllm_routes.beside_transfer",
        "RoutedExpertsBuffer.capture",
        "prefill and decode engines do not start if routes are enabled",
        "vLLM returns routes with separate prefill engines",
        "test_inference_prefill_decode.py",
        "vllm-project/vllm#55584",
    ),
    Patch(
        "vllm_routes.capture_choices",
        "deepseek_v32.attention.sparse_attn_indexer",
        "vLLM does not report which keys the indexers of sparse attention chose",
        "an answer can contain each indexer's choice",
        "test_inference_choices.py",
    ),
)


def environment(manifest: Manifest) -> dict[str, str]:
    if manifest.hardware.accelerator == "cpu":
        return {}
    chosen = {}
    if manifest.transport.routed_experts:
        chosen["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # model runner V1 cannot return chosen experts
    if manifest.choice_bytes:
        has_bits = manifest.trainer.indexer_choice == "replay"
        chosen[CHOICE_TOKENS] = str(has_bits * manifest.inference.max_model_len_tokens)
    if manifest.model.moe is not None:
        chosen[ROUTE_IN_FLOAT32] = "1"
    return chosen


def import_vllm(enforce_eager: bool) -> None:
    """Raise OrreryError without vLLM. If `enforce_eager`, import vLLM without Inductor."""
    if find_spec("vllm") is None:
        raise OrreryError(
            "inference: vLLM is not installed here. Install locks/inference.cuda.txt (GPU) or "
            "locks/inference.cpu.txt"
        )
    if enforce_eager:
        _apply("vllm.import_without_compiler")


def correct_server(manifest: Manifest) -> None:
    """Patch the API server, before vLLM parses its arguments."""
    if manifest.hardware.accelerator == "cpu":
        correct_cpu_server()
        if manifest.transport.routed_experts:
            _apply("vllm_routes.routes_on_cpu")
        if manifest.transport.weights == "adapters":
            _apply("vllm.keep_kernels_of_experts")
        if manifest.inference.expert_parallel:
            _apply("vllm.exchange_unequal_parts")
            _apply("vllm.compute_own_experts")
    _apply("vllm_answers.write_answers")
    _apply("vllm_answers.stream_samples")
    if manifest.inference.data_parallel > 1:
        _apply("vllm.answer_for_every_rank")


def correct_cpu_server() -> None:
    _apply("vllm.fork_engine_core")
    _apply("vllm.inspect_models_here")
    _apply("vllm.draw_again_after_a_part")


def correct_engine(shared_memory_name: str | None) -> None:
    """Patch an engine's process, before vLLM makes an engine core."""
    if shared_memory_name is not None:
        _apply("vllm.name_shared_memory", shared_memory_name)
    _apply("vllm.meet_at_one_address")
    _apply("vllm.sleep_for_messages")
    _apply("vllm.say_nothing_of_rounding")
    if KEPT in os.environ:
        _apply("vllm_routes.keep")
        _apply("vllm_routes.beside_transfer")
    if CHOICE_TOKENS in os.environ:
        _apply("vllm_routes.capture_choices")
    if ROUTE_IN_FLOAT32 in os.environ:
        _apply("vllm.route_in_float32")
    _apply("vllm_answers.hold_outputs")
    _apply("vllm.pause_beside_unread_blocks")
    if "VLLM_MOONCAKE_BOOTSTRAP_PORT" in os.environ:
        _apply("vllm.bootstrap_on_one_address")
        _apply("vllm.device_index_on_cpu")
        _apply("vllm.pulls_that_end_with_their_engine")
    if "VLLM_NIXL_SIDE_CHANNEL_PORT" in os.environ:
        _apply("vllm.nixl_that_waits")


def _apply(name: str, *arguments: str) -> None:
    module, _, function = name.partition(".")
    getattr(import_module(f"orrery.inference.patches.{module}"), function)(*arguments)


if __name__ == "__main__":
    for patch in PATCHES:
        print(json.dumps(patch._asdict() | {"test": f"{TESTS}/{patch.test}"}))
