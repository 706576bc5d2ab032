"""Run an engine's data-parallel ranks, without a server, on a node after its first."""

from orrery.inference.__main__ import run

if __name__ == "__main__":
    run("headless")
