"""What a block leaves for its backward pass, and what passes through memory there. All in bytes a token of this rank.

c bytes of the compute dtype · D hidden · h = query heads · head size · g = key heads · head size · F dense (or shared) intermediate ·
E experts · K experts a token · I expert intermediate · r rank of adapters

    input         c·D
    attention     c·h output, 4 · query heads log-sum-exps
    projections   c·(h + 2g) queries, keys, values · c·D output · c·2F gate and up · 4·E router logits (float32)
    experts       c·2·K·I gate and up; the down projection's output is asked for by nobody
    rest          c·2D normalised inputs · c·(h + g) turned queries and keys, where a norm stands before (else they are the projections') ·
                  c·F activation · c·K·D rows in expert order · c·K·I activation · statistics, orders of rows

- `none` keeps all of it where a block is one graph: the compiler makes nothing again that a product of the backward pass reads. Without
  the compiler silu's output stays too.
- `selective` keeps the input and what it names; `full` the input. The rest is made again, a block at a time.
- Where ranks exchange inside a block (cp, ep), some results inside its compiled parts cannot be named (`Trainer.unseen`), and those that
  can stay even where nobody asks for them.
- A frozen product (LoRA) needs no input for its weight's gradient, but its adapter does. A named result of an adapted projection stays
  twice: the projection's and the adapter's. An expert's product and its adapter's are one operator, with one result.
- Passing through: of a mixture the gradients of a layer's rows (c·K·D) and of what is between its products (c·K·I, for a graph's memory
  is free once read; c·3·K·I where a block is several); of a dense feed-forward c·(3F + D); or attention's gradients with float32 sums of
  the queries': c·(3h + 2g) + 4·h.
- The feed-forward's backward pass comes first. Where attention's output is kept and a block is one graph, what leads to it (queries, keys,
  values, and the input they are made of) is made again after that, in the room that the feed-forward's leaves.
- A block of transformers is taken for a dense one of ours: grouped heads, SwiGLU of the manifest's intermediate size, no experts, no scan,
  attention that keeps no scores. One of another shape keeps other bytes, and where its attention makes all scores, many more.
- Experts with adapters that are made again make their down projection again too, for its narrow result: c·K·D pass through besides.
"""

from dataclasses import dataclass

import torch

from orrery.manifest.schema import Model, Trainer
from orrery.trainer.parallel.compiled import is_one_graph


@dataclass(frozen=True)
class Block:
    """Bytes a token: from forward to backward; and besides in the backward pass at its fullest, made again or passing through."""

    kept: int
    backward: int


def block(model: Model, trainer: Trainer, layer: int) -> Block:
    named, unasked, rest, late = _results(model, trainer, layer)
    entry = width(trainer.compute_dtype) * model.hidden_size
    every = entry + sum(named.values()) + rest
    attention, feed_forward = _passing(model, trainer, layer)
    if trainer.memory.activation_checkpointing.kind == "none":
        return Block(every, max(attention, feed_forward))
    kept = entry + sum(named[name] for name in trainer.kept)
    if not is_one_graph(trainer, model):
        kept += sum(unasked[name] for name in trainer.kept)
    again = max(0, every - kept)
    if "attention" not in trainer.kept or not is_one_graph(trainer, model):
        return Block(kept, again + max(attention, feed_forward))
    return Block(kept, max(late + attention, again - late + feed_forward))


def width(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def is_sparse(model: Model, layer: int) -> bool:
    return model.moe is not None and layer >= model.moe.num_dense_layers


def _results(
    model: Model, trainer: Trainer, layer: int
) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Results by the name that checkpointing has for them; of the same, what no backward pass asks for; and all others.

    Last, of all that is not kept what attention's backward pass alone asks for.
    """
    c, hidden = width(trainer.compute_dtype), model.hidden_size
    h, g = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    adapted = () if trainer.lora is None else trainer.lora.targets
    rank = 0 if trainer.lora is None else trainer.lora.rank

    def copies(target: str) -> int:
        return 2 if target in adapted else 1

    def trains(target: str) -> bool:
        return trainer.lora is None or target in adapted

    def narrow(target: str, count: int) -> int:
        return c * rank * count if target in adapted else 0

    named = {"attention": c * h + 4 * model.num_heads, "experts": 0}
    inputs = c * (h + 2 * g) * copies("attention") + narrow("attention", 3)
    named["projections"] = inputs + c * hidden * copies("attention") + narrow("attention", 1)
    unasked = {"attention": 0, "projections": 0, "experts": 0}
    rest = c * hidden * trains("attention") + 8
    if model.qk_norm:
        rest += c * (h + g) + 4 * (model.num_heads + model.num_kv_heads)
    late = rest + (0 if "projections" in trainer.kept else inputs)
    dense = _dense_width(model, layer)
    if dense:
        named["projections"] += c * 2 * dense * copies("feed_forward") + narrow("feed_forward", 3)
        unasked["projections"] += c * hidden
        rest += c * dense * (trains("feed_forward") + (not trainer.compile))
    rest += c * hidden * (trains("feed_forward") or not dense)
    if is_sparse(model, layer):
        moe = model.moe
        top_k, inner = moe.num_experts_per_token, moe.expert_intermediate_size
        named["projections"] += 4 * moe.num_experts
        named["experts"] = c * top_k * 2 * inner + narrow("experts", 2 * top_k)
        unasked["experts"] = c * top_k * hidden
        rest += (
            c * top_k * (hidden + inner) * trains("experts")
            + 20 * top_k
            + 8
            + 4 * moe.num_experts * (not trainer.compile)
        )
    return named, unasked, rest, late


def _dense_width(model: Model, layer: int) -> int:
    """Of the feed-forward that every token passes: a dense one, or the shared experts beside a mixture."""
    if not is_sparse(model, layer):
        return model.intermediate_size
    return model.moe.num_shared_experts * model.moe.expert_intermediate_size


def _passing(model: Model, trainer: Trainer, layer: int) -> tuple[int, int]:
    """Through the backward pass of attention, and of the feed-forward."""
    c, h, g = (
        width(trainer.compute_dtype),
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    )
    attention = c * (3 * h + 2 * g) + 4 * h
    feed_forward = c * (3 * _dense_width(model, layer) + model.hidden_size)
    if is_sparse(model, layer):
        moe, checkpointing = model.moe, trainer.memory.activation_checkpointing
        rows = (
            1 if trainer.mesh.ep == 1 else 3
        )  # those that come and go between ranks have copies in both orders
        if (
            trainer.lora is not None
            and "experts" in trainer.lora.targets
            and checkpointing.kind != "none"
            and "experts" not in trainer.kept
        ):
            rows += 1
        between = 1 if is_one_graph(trainer, model) else 3
        feed_forward += (
            c
            * moe.num_experts_per_token
            * (rows * model.hidden_size + between * moe.expert_intermediate_size)
        )
    return attention, feed_forward
