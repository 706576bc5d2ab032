"""A network of its own for what a test starts: some programs listen on every interface, whatever
they are told.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


@contextmanager
def alone_in_a_network(why: str) -> Iterator[None]:
    """This thread, and the processes that it starts, in a new network namespace that has loopback
    and nothing else.

    Needs root; without it the test is skipped, saying `why` it is not run in the machine's own
    network.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip(
                f"NOT TESTED: {why}, so this runs in a network namespace, which needs root "
                f"({os.strerror(ctypes.get_errno())})"
            )
        try:
            with socket.socket() as any_socket:
                fcntl.ioctl(
                    any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP)
                )  # a new namespace's loopback is down
            yield
        finally:
            if libc.setns(before.fileno(), CLONE_NEWNET) != 0:
                raise OSError(
                    ctypes.get_errno(), "cannot go back to the network namespace of before"
                )
