"""Delay packets between network namespaces: a hub of TUN devices, for kernels without netem.

python benchmarks/elastic/delay.py ONE_WAY_MS NAMESPACE=ADDRESS …     as root, until its stdin ends

Each namespace gets the device e0 with its address. Packets stay as large as TCP made them (TSO), so
that a gigabit takes a few thousand turns of Python a second.
"""

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
TUN, NO_PI, VNET_HDR = 0x0001, 0x1000, 0x4000
CHECKSUM, TSO4 = 0x01, 0x02
HEADER = 10  # bytes of virtio_net_hdr before the IP packet
MOST = 1 << 17


def opened(space: str, address: str) -> int:
    """Make e0 in a namespace. Return its descriptor."""
    with Path(f"/run/netns/{space}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"e0", TUN | NO_PI | VNET_HDR))
    fcntl.ioctl(device, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
    fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUM | TSO4)
    for words in (f"addr add {address}/24 dev e0", "link set e0 txqueuelen 10000 up"):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def forward(devices: dict[bytes, int], delay_s: float) -> None:
    """Forward each packet to its destination after `delay_s`."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    watched = [*devices.values(), sys.stdin.fileno()]
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(watched, [], [], left_s)
        if sys.stdin.fileno() in ready:
            return
        now_s = time.monotonic()
        for device in ready:
            for _ in range(16):
                try:
                    packet = os.read(device, MOST)
                except BlockingIOError:
                    break
                target = devices.get(packet[HEADER + 16 : HEADER + 20])
                if target is not None:
                    waiting.append((now_s + delay_s, target, packet))
        while waiting and waiting[0][0] <= now_s:
            _, target, packet = waiting.popleft()
            with contextlib.suppress(BlockingIOError):  # drop packets if the queue is full
                os.write(target, packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("delay_ms", type=float)
    parser.add_argument("places", nargs="+", metavar="SPACE=ADDRESS")
    options = parser.parse_args()
    devices = {}
    for place in options.places:
        space, _, address = place.partition("=")
        devices[socket.inet_aton(address)] = opened(space, address)
    print("ready", flush=True)
    forward(devices, options.delay_ms / 1000)


if __name__ == "__main__":
    main()
