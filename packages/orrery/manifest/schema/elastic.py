"""Define training at several sites, and constraints of sites and guest (lent) engines."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from orrery.manifest.schema.model import MAX_S, Count, Decay, NonNegativeInt, Record, Size, Steps

if TYPE_CHECKING:
    from orrery.manifest.schema.manifest import Manifest

Seconds = Annotated[float, Field(gt=0.0, le=MAX_S)]
# Bytes of a trained parameter, in float32
OUTER_BYTES = 8  # weight at the round's start, and outer momentum
HOST_BYTES = 12  # these, and the change Δ of the weight
FEEDBACK_BYTES = 8  # lost and pending errors of the codec
OFF = "or set trainer.elastic to null"


class OuterSgd(Record):
    """The outer optimizer: SGD with the sites' mean weight change Δ as gradient.

    DiLoCo (arXiv 2311.08105) uses lr 0.7, momentum 0.9 and Nesterov momentum.
    """

    lr: PositiveFloat
    momentum: Decay
    nesterov: bool


class Snapshots(Record):
    """Copies of a site's state in shared memory. Other sites recover from them.

    `keep`: number of newest copies. `block_bytes`: size of a hashed block.
    """

    keep: Count
    block_bytes: Size


class Elastic(Record):
    """Training of one model at several sites, each with this manifest's mesh.

    - Training starts once `min_sites` have joined. At most `max_sites` train at a time.
    - A round has `inner_steps` optimizer steps. Then sites exchange Δ, encoded by `codec`. Δ is the
      weights at the round's start minus the current weights. `error_feedback` adds the codec's
      error to the next Δ.
    - `weights` "tokens": a site's weight in the mean Δ is its tokens since the last exchange.
    - `admission` "closed": sites may join only before the first round.
    - An exchange starts when all live sites have arrived, or `grace_s` after `quorum` sites have.
      A late site adds its Δ to the next round.
    - A site sends heartbeats every `heartbeat_s` / 2. After `dead_after_s` without one, it is dead.
    - `voters`: maximum number of sites that run etcd, which stores the log of rounds.
    - `fragments` F: layer i belongs to fragment i mod F. Every `inner_steps` / F steps, sites
      exchange the next fragment (Streaming DiLoCo, arXiv 2501.18512).
    - `delay_steps`: training steps during an exchange. After it, the fragment's weights become
      `delay_merge` · local + (1 − `delay_merge`) · common weights.
    """

    min_sites: Count
    max_sites: Count
    inner_steps: Steps
    fragments: Count
    delay_steps: NonNegativeInt
    delay_merge: Decay
    outer: OuterSgd
    codec: Literal["float32", "int8_block", "int8_codebook", "int4_block", "top_k_2bit"]
    error_feedback: bool
    topology: Literal["ring", "all_to_all"]
    weights: Literal["tokens", "equal"]
    admission: Literal["open", "closed"]
    quorum: Count
    voters: Count
    grace_s: Seconds
    heartbeat_s: Seconds
    dead_after_s: Seconds
    store_timeout_s: Seconds
    exchange_timeout_s: Seconds
    snapshots: Snapshots


def host_bytes(elastic: Elastic, num_parameters: int, inner_bytes: int) -> int:
    """Return a rank's host bytes for rounds and snapshots.

    `num_parameters`: trained by the rank. `inner_bytes`: its inner optimizer's state.
    """
    sent = 4 * num_parameters // elastic.fragments if elastic.delay_steps else 0
    held = HOST_BYTES + FEEDBACK_BYTES * elastic.error_feedback
    snapshots = (elastic.snapshots.keep + 1) * snapshot_bytes(num_parameters, inner_bytes)
    return held * num_parameters + sent + snapshots


def snapshot_bytes(num_parameters: int, inner_bytes: int) -> int:
    return OUTER_BYTES * num_parameters + inner_bytes


def elastic_misfits(run: "Manifest") -> Iterator[str]:
    elastic, trainer = run.trainer.elastic, run.trainer
    if elastic is None:
        return
    if elastic.min_sites > elastic.max_sites:
        yield (
            f"trainer.elastic.min_sites {elastic.min_sites} exceeds max_sites "
            f"{elastic.max_sites}; set it to at most that"
        )
    if elastic.quorum > elastic.min_sites:
        yield (
            f"trainer.elastic.quorum {elastic.quorum} exceeds min_sites {elastic.min_sites}; "
            f"set it to at most that"
        )
    order = ("heartbeat_s", "dead_after_s", "store_timeout_s", "exchange_timeout_s")
    for sooner, later in pairwise(order):
        if (one := getattr(elastic, sooner)) >= (other := getattr(elastic, later)):
            yield (
                f"trainer.elastic.{sooner} {one:g} is not below {later} {other:g}; "
                f"set it to less than that"
            )
    if trainer.mesh.dp_replicate > 1:
        yield (
            f"trainer.elastic with trainer.mesh.dp_replicate {trainer.mesh.dp_replicate}: replicas "
            f"would exchange the same weights twice; set it to 1, {OFF}"
        )
    if run.model.num_layers < elastic.fragments or elastic.inner_steps % elastic.fragments:
        yield (
            f"trainer.elastic.fragments {elastic.fragments}: it must divide inner_steps "
            f"{elastic.inner_steps} and be at most model.num_layers {run.model.num_layers}; "
            f"set it to 1"
        )
    elif elastic.delay_steps >= (phase := elastic.inner_steps // elastic.fragments):
        yield (
            f"trainer.elastic.delay_steps {elastic.delay_steps} is not below inner_steps / "
            f"fragments {phase}; set it to at most {phase - 1}"
        )
    steps = {
        "trainer.checkpoint.interval_steps": trainer.checkpoint.interval_steps,
        "stages.rl.num_steps": run.stages.rl.num_steps,
    }
    if (sft := run.stages.sft) is not None:
        steps["stages.sft.num_steps"] = sft.num_steps
    for field, value in steps.items():
        if value % elastic.inner_steps:
            fits = max(1, value // elastic.inner_steps) * elastic.inner_steps
            yield (
                f"{field} {value} is not a multiple of trainer.elastic.inner_steps "
                f"{elastic.inner_steps}; set it to {fits}, {OFF}"
            )
    if run.orchestrator.evaluation.stop_at is not None:
        yield (
            f"orchestrator.evaluation.stop_at {run.orchestrator.evaluation.stop_at:g} with "
            f"trainer.elastic: each site would end RL at another step, with other weights; set it "
            f"to null, {OFF}"
        )
    if sft is not None and sft.data.kind != "text":
        yield (
            f"stages.sft.data.kind {sft.data.kind!r} with trainer.elastic: every site would train "
            f"the same examples; set it to 'text', {OFF}"
        )
    elif sft is not None and sft.data.kind == "text" and sft.data.num_shards < elastic.max_sites:
        yield (
            f"stages.sft.data.num_shards {sft.data.num_shards} is below "
            f"trainer.elastic.max_sites {elastic.max_sites}; set it to at least that"
        )


def guest_misfits(run: "Manifest") -> Iterator[str]:
    guests = run.orchestrator.guests
    if guests is None:
        return
    most = run.orchestrator.max_off_policy_steps
    if guests.max_versions_behind > most:
        yield (
            f"orchestrator.guests.max_versions_behind {guests.max_versions_behind} exceeds "
            f"max_off_policy_steps {most}; set it to at most that"
        )
    for field, found, wanted in (
        ("transport.weights", run.transport.weights, "files"),
        ("transport.routed_experts", run.transport.routed_experts, False),
        ("inference.prefill_replicas", run.inference.prefill_replicas, 0),
        ("inference.nodes_per_replica", run.inference.nodes_per_replica, 1),
        ("hardware.num_nodes", run.hardware.num_nodes, 1),
        ("trainer.elastic", run.trainer.elastic, None),
    ):
        if found != wanted:
            yield (
                f"{field} with orchestrator.guests: engines of other sites need "
                f"{json.dumps(wanted)}; set it to that, or orchestrator.guests to null"
            )
