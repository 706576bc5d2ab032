"""Run one vLLM server: `python -m orrery.inference`.

- In a run, the server is a replica.
- `orrery serve` (stage SERVE) loads the folder to which `weights/serve` links, without a manifest.
"""

import gc
import os
from functools import partial
from pathlib import Path

import psutil

from orrery.inference.assemble import (
    INDEX,
    blank_adapter,
    check_release,
    engine_and_part,
    engine_environment,
    folder_arguments,
    folder_environment,
    meeting_point,
    node_arguments,
    server_arguments,
    weights_dir,
)
from orrery.inference.kv_connectors import connect, disk_folder
from orrery.inference.patches import registry
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.runtime.network import run_token
from orrery.runtime.role_context import RoleContext, role_process
from orrery.runtime.run_directory import weights_path

SERVE = "serve"
MAX_CPU_CACHE_BYTES = 4 << 30
CPU_SHARE = 4
MAX_ERROR_CHARACTERS = 300


def main() -> None:
    run("inference")


def run(role: str) -> None:
    gc.disable()  # speeds up the imports
    with role_process(role) as ctx:
        if ctx.stage == SERVE:
            serve_folder(ctx)
        else:
            serve_replica(ctx)


def serve_replica(ctx: RoleContext) -> None:
    run_token()  # a missing credential raises RunFailed here, before vLLM's slow start
    ctx.health.doing("loading vLLM")
    engine, part = engine_and_part(ctx)
    inference = ctx.manifest.inference.of_engine(engine)
    ctx.manifest = manifest = ctx.manifest.model_copy(update={"inference": inference})
    os.environ.update(inference.environment)
    engine_environment(manifest, ctx.host)
    os.environ[INDEX] = str(engine)
    adapter = blank_adapter(ctx.run_dir, manifest, ctx.stage, ctx.name)
    weights = weights_dir(ctx.run_dir, manifest)
    arguments = server_arguments(manifest, weights, engine, ctx.host, ctx.port, adapter)
    arguments += connect(ctx, engine)
    if inference.nodes_per_replica > 1:
        arguments += node_arguments(inference, part, *meeting_point(ctx, engine, part))
    registry.import_vllm(manifest.inference.enforce_eager)
    from vllm import ModelRegistry, __version__

    check_release(manifest, weights, ModelRegistry.get_supported_archs(), __version__)
    from orrery.inference import server

    registry.correct_server(manifest)
    explain = partial(server.explain_memory, manifest=manifest, weights=weights)
    server.serve(ctx, arguments, disk_folder(ctx), explain)


def serve_folder(ctx: RoleContext) -> None:
    if not run_token():
        raise OrreryError("no token arrived on standard input; type `orrery serve FOLDER`")
    ctx.health.doing("loading vLLM")
    folder = weights_path(ctx.run_dir, ctx.stage).resolve()
    is_cpu = not Path("/dev/nvidiactl").exists()
    folder_environment(ctx.host, is_cpu)
    registry.import_vllm(enforce_eager=is_cpu)
    from orrery.inference import server

    cache_bytes = None
    if is_cpu:
        registry.correct_cpu_server()
        cache_bytes = min(psutil.virtual_memory().available // CPU_SHARE, MAX_CPU_CACHE_BYTES)
    try:
        server.serve(ctx, folder_arguments(folder, ctx.host, ctx.port, cache_bytes))
    except (ValueError, KeyError, OSError) as error:
        raise RunFailed(f"vLLM cannot serve this folder: {first_sentence(error)}") from error


def first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Value error, ")), (lines or [""])[0])
    said = said.removeprefix("Value error, ").partition(" [type=")[0]
    return said[:MAX_ERROR_CHARACTERS] or type(error).__name__


if __name__ == "__main__":
    main()
