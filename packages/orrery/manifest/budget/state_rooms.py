"""Plan how much device memory offloaded optimizer state may use at each moment of a step.

State is copied during computation, into memory that activations and gradients do not use at that
moment. So the copied state does not raise the planned peak.
"""

from dataclasses import dataclass
from itertools import accumulate

from orrery.manifest.budget.parameters import ParameterCounts, count_parameters
from orrery.manifest.budget.trainer_memory import MemoryPlan, Workload, plan_memory, state_bytes
from orrery.manifest.schema import Model, Trainer

SHARE = 0.9  # share of the planned free memory to use, because plans have errors


@dataclass(frozen=True)
class StateRooms:
    """Bytes of optimizer state that fit on the device, by block.

    - `forward`, `backward`: bytes that fit from the start of the block's forward or backward pass
      on, in a step's first micro-batch.
    - `head`: bytes that fit while the LM head of the first micro-batch runs.
    - `arriving`: bytes that fit from the start of the block's backward pass in the last micro-batch
      to the end of the step.
    """

    forward: tuple[int, ...]
    head: int
    backward: tuple[int, ...]
    arriving: tuple[int, ...]


def state_rooms(
    model: Model,
    trainer: Trainer,
    micro_batches: int,
    device_bytes: int,
    counted: ParameterCounts | None = None,
) -> StateRooms:
    """Return the bytes of state that fit at each moment of a step of `micro_batches` micro-batches.

    Raise OrreryError for family `hugging_face`.
    """
    tokens = trainer.memory.max_tokens_per_micro_batch

    def planned(count: int) -> MemoryPlan:
        load = Workload(tokens, tokens, count)
        return plan_memory(model, trainer, load, device_bytes, counted)

    last = planned(micro_batches)
    first = planned(1) if micro_batches > 1 else last
    peak, names = last.peak_bytes, list(last.moments)
    resident, _ = state_bytes(trainer, counted or count_parameters(model, trainer.lora))
    states = last.moments[last.fullest]["optimizer state"] - resident

    def room(used: int) -> int:
        return states + int(SHARE * max(0, peak - used))

    def used(plan: MemoryPlan, name: str, without: tuple[str, ...] = ()) -> int:
        return sum(size for kind, size in plan.moments[name].items() if kind not in without)

    # Whole gradients wait between micro-batches. Only the plan `last` counts their memory.
    has_whole = trainer.needs_fsdp and trainer.fsdp.reduce_gradients == "step"
    back = last if has_whole else first
    # For each moment, the most memory used from this moment on.
    most = list(accumulate((used(last, name) for name in reversed(names)), max))[::-1]
    forward, backward, arriving = [], [], []
    for layer in range(model.num_layers):
        name = f"block {layer}, backward"
        position = names.index(name)
        forward.append(room(used(first, name, ("gradients", "reduction"))))
        backward.append(room(max(used(back, one) for one in names[position : position + 2])))
        arriving.append(room(most[position]))
    return StateRooms(
        tuple(forward), room(used(first, "LM head")), tuple(backward), tuple(arriving)
    )
