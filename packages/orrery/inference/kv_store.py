"""Run a Mooncake Store's master (shared KV cache): `python -m orrery.inference.kv_store`."""

import socket
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

from orrery.inference.kv_connectors import refuse_open_interfaces
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.runtime.network import free_ports
from orrery.runtime.process_control import die_with_parent
from orrery.runtime.role_context import role_process
from orrery.wire import rendezvous

# Library → Debian package
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libcurl.so.4": "libcurl4"}


def master_program() -> Path:
    program = Path(sysconfig.get_path("platlib")) / "mooncake" / "mooncake_master"
    if not program.is_file():
        raise OrreryError(
            "inference.kv_offload.kind 'mooncake': Mooncake is not installed here. "
            "Type `make setup`, or choose 'tiers'"
        )
    for library, package in LIBRARIES.items():
        if not _loads(library):
            raise OrreryError(
                f"inference.kv_offload.kind 'mooncake': {library} is missing, and Mooncake needs "
                f"it even for TCP. Type `apt-get install -y {package}`, or rebuild the image from "
                "containers/"
            )
    return program


def main() -> None:
    with role_process("kv_store") as ctx:
        refuse_open_interfaces("inference.kv_offload.kind 'mooncake'")
        program = master_program()
        free_port, metrics_port = free_ports(2, ctx.host)
        port = ctx.port or free_port
        arguments = {
            "rpc_address": ctx.host,
            "rpc_port": port,
            "metrics_host": ctx.host,
            "metrics_port": metrics_port,
        }
        ctx.health.doing("starting mooncake_master")
        process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in arguments.items())],
            preexec_fn=die_with_parent,
        )
        try:
            listens = partial(_listens, ctx.host, port)
            ctx.await_program(process, "mooncake_master", "listen", listens)
            rendezvous.publish(ctx, f"http://{ctx.host}:{metrics_port}", rpc=f"{ctx.host}:{port}")
            ctx.health.doing("serving")
            raise RunFailed(
                f"kv_store: mooncake_master ended early (exit code {process.wait()}). "
                f"Read logs/{ctx.name}.log"
            )
        finally:
            process.kill()
            process.wait()


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _loads(library: str) -> bool:
    """Return whether the library loads in a subprocess.

    In this process, the library could conflict with NIXL's rdma-core and crash at exit.
    """
    probe = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)"
    command = [sys.executable, "-S", "-c", probe, library]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    main()
