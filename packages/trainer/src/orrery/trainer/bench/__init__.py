"""`python -m orrery.trainer.bench MANIFEST`: the trainer's speed and memory on made-up batches, on the devices of this machine.

- `request.py` is what to measure: a manifest's model and trainer, fitted to the devices at hand, with every change by name.
- `rows.py` says the options of runs that have a row in the docs' table.
- `start.py` starts one process a device, ends them together and gathers what they say.
- `rank.py` is one of them: the policy and the learner as in real training, batches of `batches.py`, steps on the clock.
- `phases.py` divides one step among kinds of work by the profiler's trace.
- `expected.py` says from operations and bytes what the step should take.
- `report.py` puts it together, as JSON and as a table.

It needs no run folder, no launcher and no other role.
"""
