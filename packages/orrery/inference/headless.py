"""Run an engine's data-parallel ranks on a further node, without a server."""

from orrery.inference.__main__ import run

if __name__ == "__main__":
    run("headless")
