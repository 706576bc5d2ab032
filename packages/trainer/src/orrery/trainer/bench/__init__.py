"""`orrery bench trainer`: a trainer's speed and memory on made-up batches, on this machine.

- `__main__.py` parses the command line, and starts and watches one process a device.
- `request.py` fits a manifest to the devices, lists every change, and makes the batches.
- `rank.py` is one of the processes: it times steps, and splits one by the profiler's trace.
- `report.py` compares the step with the time that its work should take, as JSON and a table.

It needs no run folder, launcher or other role.
"""
