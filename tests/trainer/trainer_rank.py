"""Run the jobs in FOLDER/jobs.json as one rank: `trainer_rank.py FOLDER PORT WORLD_SIZE RANK`.

A job has "name", "manifest" (keywords of `manifest`), "steps", and optionally "batch" (keywords of
`train`), "compare" (the first batch, after the steps), "resume", "save", "export" (folders),
"held" (compare the shards of a direct wire with whole tensors), and a fault on one rank:
"bit_flipped_on" (in the first weight, before saving), "moment_lost_on" (NaN in a first moment,
before saving), "broken_on" (NaN in the backward pass of the first block's attention).
Weights go to FOLDER/<name>.safetensors. The last line of stdout has the steps' metrics.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trainer_cases import (
    batch_columns,
    make_learner,
    manifest,
    rank_device,
    save_checkpoint,
    share,
    whole_weights,
    write_start_weights,
)

from orrery.manifest.errors import RunFailed
from orrery.models import weights
from orrery.models.placement import local_tensor
from orrery.trainer import checkpoint
from orrery.trainer.learner import Learner, count_totals
from orrery.trainer.parallel.world import World, destroy_world, init_world, make_world
from orrery.trainer.publish import DirectPublisher
from orrery.wire.fingerprint import digest, tensor_fingerprint


def train(
    learner: Learner,
    steps: list[int],
    num_samples: int = 7,
    max_tokens: int = 64,
    poison: int | None = None,
) -> list[dict]:
    """Train random batches. With `poison`, that rank's last step has NaN advantages."""
    rows = []
    for step in steps:
        mine = share(
            batch_columns(step, num_samples),
            learner.trainer.mesh.num_data_ranks,
            learner.world.data_rank,
            max_tokens,
        )
        totals = count_totals(mine, learner.world)
        if poison == learner.world.rank and step == steps[-1]:
            mine[0].token["advantage"][:] = float("nan")
        rows.append(learner.learn(mine, len(mine), totals, 1.0).metrics)
    return rows


class Captured:
    """A source that only records."""

    def publish(self, version: int, held, standing, report, canary) -> None:
        self.held = held()


def held_by_this_rank(learner: Learner) -> dict:
    """Return the elements that this rank would send, and their largest error."""
    source = Captured()
    publisher = DirectPublisher(learner.policy, source, torch.float32, None)
    publisher.publish(0)
    train(learner, [9])  # the second time the same shards are filled again
    publisher.publish(1)
    whole = dict(weights.named_hf_tensors(learner.policy.network))
    differences, num_elements = [torch.zeros(())], 0
    for one in source.held:
        part = whole[one.name][tuple(slice(*side) for side in one.box)]
        if part.numel():
            assert one.local.shape == part.shape
            differences.append((one.local.detach() - part).abs().max())
            num_elements += part.numel()
    bits = digest({one.name: tensor_fingerprint(one.local) for one in source.held})
    num_whole = sum(tensor.numel() for tensor in whole.values())
    difference = torch.stack(differences).max().item()  # NaN where one is
    return {
        "difference": difference,
        "num_elements": num_elements,
        "num_whole": num_whole,
        "bits": bits,
    }


def break_backward(module: torch.nn.Module, given: tuple, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: gradient * float("nan"))


def do(job: dict, folder: Path, world: World) -> dict:
    spec = manifest(**job["manifest"])
    start = folder / f"start_{job['name']}"
    if world.is_first:
        write_start_weights(spec, start)
    world.barrier()
    learner = make_learner(spec, start, make_world(spec.trainer.mesh, world.rank, world.device))
    if "resume" in job:
        checkpoint.load(learner, Path(job["resume"]))
    answer = {}
    if world.rank == job.get("broken_on"):
        learner.policy.network.layers[0].self_attn.register_forward_hook(break_backward)
    try:
        answer["rows"] = train(learner, job["steps"], **job.get("batch", {}))
        if world.rank == job.get("bit_flipped_on"):
            local_tensor(next(iter(learner.weights.values())).detach()).view(torch.int32).view(-1)[
                0
            ] ^= 1
        if world.rank == job.get("moment_lost_on"):
            next(
                held
                for key, held in checkpoint.state_of(learner).items()
                if key.startswith("exp_avg/")
            ).local.view(-1)[0] = float("nan")
        if "save" in job:
            save_checkpoint(learner, Path(job["save"]))
    except RunFailed as error:
        answer["error"] = str(error)
    if "compare" in job:
        learner.compare(share(batch_columns(1), world.size, world.rank))
    if "held" in job:
        answer["held"] = held_by_this_rank(learner)
    if "export" in job:
        weights.save(learner.policy.network, spec.model, Path(job["export"]))
    whole = whole_weights(learner)
    if world.is_first:
        save_file(whole, folder / f"{job['name']}.safetensors")
    return answer


def main() -> None:
    folder, port, size, rank = Path(sys.argv[1]), *map(int, sys.argv[2:])
    jobs = json.loads((folder / "jobs.json").read_text())
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False)
    world = init_world(manifest(**jobs[0]["manifest"]).trainer.mesh, rank, rank_device(rank), store)
    answers = {job["name"]: do(job, folder, world) for job in jobs}
    destroy_world(world)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
