"""Serve a Hugging Face folder for `orrery serve`: `python -m orrery.inference.folder`.

The run directory has no manifest, and `weights/serve` links to the folder. On CPU, vLLM's `--dtype`
is config.json's dtype, because vLLM's default is never float32.
"""

import gc
import os
from pathlib import Path

import psutil

from orrery.inference.assemble import PLUGIN, UNIPROC
from orrery.inference.patches.registry import correct_cpu_server, import_vllm
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.json_file import read_object
from orrery.runtime.network import name_interface
from orrery.runtime.role_context import log_level, role_process
from orrery.runtime.run_directory import weights_path
from orrery.runtime.token import run_token

MAX_CPU_CACHE_BYTES = 4 << 30
CPU_SHARE = 4
MAX_ERROR_CHARACTERS = 300


def arguments(folder: Path, host: str, port: int, cpu_cache_bytes: int | None) -> list[str]:
    found = ["--model", str(folder), "--served-model-name", folder.name]
    found += ["--host", host, "--port", str(port), "--max-model-len", "auto"]
    found += ["--middleware", "orrery.inference.front.RequireKey"]
    found += ["--uvicorn-log-level", "warning"]
    found += ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if cpu_cache_bytes is not None:
        dtype = read_object(folder / "config.json", "copy it again").get("dtype") or "auto"
        found += ["--dtype", str(dtype)]
        found += ["--kv-cache-memory-bytes", str(cpu_cache_bytes), "--enforce-eager"]
        found += ["--distributed-executor-backend", UNIPROC]
    return found


def environment(host: str, is_cpu: bool) -> None:
    variables = {"VLLM_PLUGINS": PLUGIN, "VLLM_HOST_IP": host, "VLLM_NO_USAGE_STATS": "1"}
    variables |= {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if is_cpu:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override --kv-cache-memory-bytes
    os.environ.update(variables)
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", (log_level() or "warning").upper())
    name_interface()


def first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Value error, ")), (lines or [""])[0])
    said = said.removeprefix("Value error, ").partition(" [type=")[0]
    return said[:MAX_ERROR_CHARACTERS] or type(error).__name__


def main() -> None:
    gc.disable()
    with role_process("inference") as ctx:
        if not run_token():
            raise OrreryError("no token arrived on standard input; type `orrery serve FOLDER`")
        ctx.health.doing("loading vLLM")
        folder = weights_path(ctx.run_dir, ctx.stage).resolve()
        is_cpu = not Path("/dev/nvidiactl").exists()
        environment(ctx.host, is_cpu)
        import_vllm(enforce_eager=is_cpu)
        from orrery.inference import server

        cache_bytes = None
        if is_cpu:
            correct_cpu_server()
            cache_bytes = min(psutil.virtual_memory().available // CPU_SHARE, MAX_CPU_CACHE_BYTES)
        try:
            server.serve(ctx, arguments(folder, ctx.host, ctx.port, cache_bytes))
        except (ValueError, KeyError, OSError) as error:
            raise RunFailed(f"vLLM cannot serve it: {first_sentence(error)}") from error


if __name__ == "__main__":
    main()
