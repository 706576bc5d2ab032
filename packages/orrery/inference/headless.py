"""Run an engine's data-parallel ranks on a node other than its first, without a server."""

from orrery.inference.__main__ import run

if __name__ == "__main__":
    run("headless")
