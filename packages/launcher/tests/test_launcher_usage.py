"""Usage of a process counts its tree, without the trees that have names of their own."""

import os
import subprocess
import sys

from orrery.launcher.usage import UsageSampler


def test_a_named_child_counts_for_itself_only():
    child = subprocess.Popen(
        [sys.executable, "-c", "held = bytearray(200 << 20); print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        together = UsageSampler().sample({"launcher": os.getpid()})
        apart = UsageSampler().sample({"launcher": os.getpid(), "role": child.pid})
        assert apart["role"]["rss_bytes"] > 200 << 20
        assert together["launcher"]["rss_bytes"] - apart["launcher"]["rss_bytes"] > 150 << 20
    finally:
        child.communicate(b"\n")
