"""`python -m orrery.inference`: one vLLM server, replica `index` of the stage."""

import gc
import os

from orrery.inference.adapter_start import blank_adapter
from orrery.inference.assemble import engine_environment, server_arguments, weights_dir
from orrery.inference.kv_offload import offload
from orrery.inference.releases import import_vllm
from orrery.inference.token import INDEX
from orrery.observe.process import role_process
from orrery.transport.token import run_token


def main() -> None:
    gc.disable()  # importing torch and vLLM makes millions of objects that all stay; `serve` collects again once it is up
    with role_process("inference") as me:
        run_token()  # refuses to go on without one, before the minutes that loading may take
        me.health.doing("loading vLLM")
        manifest = me.manifest
        engine_environment(manifest, me.host)
        os.environ[INDEX] = str(me.index)
        adapter = blank_adapter(me.run_dir, manifest, me.stage, me.index)
        arguments = server_arguments(
            manifest, weights_dir(me.run_dir, manifest), me.index, me.host, me.port, adapter
        )
        arguments += offload(me)
        import_vllm(manifest)
        from orrery.inference.server import (
            serve,
        )  # imports vLLM, which reads the environment as it is imported

        serve(me, arguments)


if __name__ == "__main__":
    main()
