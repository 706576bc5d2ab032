"""A separate network for a test's processes, as some programs listen on every interface."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from forked_roles import CLONE_NEWNET

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


@contextmanager
def alone_in_a_network(why: str) -> Iterator[None]:
    """Move this thread and its new processes into a network namespace with loopback only.

    Without root skip the test. `why`: the reason for the namespace.
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
                # A new namespace's loopback is down.
                fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
            yield
        finally:
            if libc.setns(before.fileno(), CLONE_NEWNET) != 0:
                raise OSError(
                    ctypes.get_errno(), "cannot go back to the network namespace of before"
                )
