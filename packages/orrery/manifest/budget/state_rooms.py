"""Plan the device memory for offloaded optimizer state at each moment of a step.

State fills only memory below the planned peak, so the peak does not rise.
"""

from dataclasses import dataclass
from itertools import accumulate

from orrery.manifest.budget.parameters import ParameterCounts, count_parameters
from orrery.manifest.budget.trainer_memory import MemoryPlan, Workload, plan_memory, state_bytes
from orrery.manifest.schema import Model, Trainer

SHARE = 0.9  # share of free memory to use, as plans have errors


@dataclass(frozen=True)
class StateRooms:
    """Bytes of optimizer state that fit on the device, by block.

    `forward`, `backward`: during the block's passes in the first micro-batch. `head`: during the LM
    head in that micro-batch. `arriving`: from the block's backward pass in the last micro-batch to
    the step's end.
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
    """Raise OrreryError for family `hugging_face`."""
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

    # The plan `first` omits unsharded gradients that wait for later micro-batches.
    has_whole = trainer.needs_fsdp and trainer.fsdp.reduce_gradients == "step"
    back = last if has_whole else first
    # maximum memory in use from each moment on
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
