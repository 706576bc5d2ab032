"""Two engines and a Mooncake Store, in a network namespace that `test_inference_kv_offload` has made: a program, not a test."""

import asyncio
import fcntl
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from inference_servers import DENSE, await_published, make_run, start_role, stop
from test_inference_kv_offload import BLOCKS, STORE, ask, forget, same, until_found

from orrery.transport.engine import EngineClient

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


async def share(urls: list[str]) -> None:
    """What the first engine computed, the second finds; nobody finds it under another salt."""
    async with EngineClient(urls[0]) as one, EngineClient(urls[1]) as other:
        fresh = await ask(one, "fresh", "3")
        assert fresh.cached_tokens == 0
        found = await until_found(other, "3", "found")
        assert found.cached_tokens == BLOCKS, found.cached_tokens
        newer = await ask(other, "newer", "4")
        assert newer.cached_tokens == 0
        await forget(one)
        again = await until_found(one, "3", "again")
        assert again.cached_tokens == BLOCKS
        for each in (found, newer, again):
            same(fresh, each)


def main() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))  # a new namespace's loopback is down
    run_dir = make_run(Path(sys.argv[1]), DENSE, num_replicas=2, inference=STORE)
    roles = [("kv_store", 0), ("inference", 0), ("inference", 1)]
    modules = {"kv_store": "orrery.inference.kv_store", "inference": "orrery.inference"}
    processes = [start_role(modules[role], run_dir, index) for role, index in roles]
    try:
        urls = [await_published(run_dir, *role, process) for role, process in zip(roles, processes, strict=True)]
        asyncio.run(share(urls[1:]))
        print("shared")
    finally:
        for process in reversed(processes):
            stop(process)


if __name__ == "__main__":
    main()
