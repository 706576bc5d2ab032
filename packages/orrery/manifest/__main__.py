"""`python -m orrery.manifest`: the commands about specs, without the launcher."""

from orrery.manifest.cli import main

main()
