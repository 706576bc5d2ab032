"""`orrery bench trainer`: a trainer's speed and memory on made-up batches, on this machine.

`__main__.py` parses, and starts a process a device. `request.py` fits a manifest to the devices and
makes batches. `rank.py` times steps. `report.py` compares them with the expected time.
"""
