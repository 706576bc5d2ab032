"""Run the vLLM server of one replica: `python -m orrery.inference`.

Further nodes of a replica run `orrery.inference.headless`.
"""

import gc
import os
from functools import partial

from orrery.inference import out_of_memory
from orrery.inference.assemble import (
    blank_adapter,
    check_release,
    engine_and_part,
    engine_environment,
    meeting_point,
    node_arguments,
    server_arguments,
    weights_dir,
)
from orrery.inference.front import INDEX
from orrery.inference.kv_connectors import connect, disk_folder
from orrery.inference.patches import registry
from orrery.runtime.role_context import role_process
from orrery.runtime.token import run_token


def main() -> None:
    run("inference")


def run(role: str) -> None:
    gc.disable()  # garbage collection would slow the imports
    with role_process(role) as ctx:
        run_token()  # check the token before vLLM's long start
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
        explain = partial(out_of_memory.explain, manifest=manifest, weights=weights)
        server.serve(ctx, arguments, disk_folder(ctx), explain)


if __name__ == "__main__":
    main()
