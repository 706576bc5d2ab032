"""Count the activation bytes per token of a block on a trainer rank.

Variables: c is the bytes of a `compute_dtype` value, h the width of all query heads, and g the
width of all key heads.
"""

from dataclasses import dataclass

from orrery.manifest.budget.parameters import is_sparse, keys_per_query
from orrery.manifest.devices import SPARSE_PAIRS
from orrery.manifest.schema import Model, Trainer
from orrery.manifest.schema.model import DTYPE_BYTES


@dataclass(frozen=True)
class ActivationBytes:
    """A block's activation bytes per token.

    `kept`: held until the backward pass. `backward`: maximum that the backward pass adds.
    `late`: this maximum once gradients of the experts' gate and up projections exist.
    """

    kept: int
    backward: int
    late: int


@dataclass(frozen=True)
class _Results:
    """Bytes per token of a block's forward tensors.

    - `named`: tensors that selective checkpointing can keep, by name in `keep`.
    - `unread`: tensors kept under these names, but not read by the backward pass.
    - `rest`: unnamed tensors.
    - `for_attention`: recomputed tensors that only attention's backward pass reads.
    - `of_attention`, `of_feed_forward`: each module that `ModuleCheckpointing` recomputes.
    """

    named: dict[str, int]
    unread: dict[str, int]
    rest: int
    for_attention: int
    of_attention: list[int]
    of_feed_forward: list[int]


def activation_bytes(model: Model, trainer: Trainer, layer: int) -> ActivationBytes:
    results = _results(model, trainer, layer)
    entry = DTYPE_BYTES[trainer.compute_dtype] * model.hidden_size
    every = entry + sum(results.named.values()) + results.rest
    attention, feed_forward = _temporaries(model, trainer, layer)
    inner = rows = 0  # bytes of experts' intermediate rows, and of input rows
    if is_sparse(model, layer):
        inner, rows = _routed_bytes(model, trainer)
    if not trainer.memory.checkpoints(layer):
        late, early = sum(results.of_attention), results.of_feed_forward
        attention, feed_forward = late + attention, max(early, default=0) + feed_forward
        return _backward(every - late - sum(early), attention, feed_forward, inner)
    is_graph = trainer.is_one_graph(model)
    kept = entry + sum(results.named[name] for name in trainer.kept)
    if not is_graph:
        kept += sum(results.unread[name] for name in trainer.kept)
    again = max(0, every - kept)
    late = results.for_attention
    if "attention" not in trainer.kept or not is_graph:
        # Recomputed rows of experts are freed before attention's backward pass.
        freed = 0 if "experts" in trainer.kept else 2 * inner
        if trainer.lora is None or "experts" in trainer.lora.targets:
            freed += rows + inner
        return _backward(kept, again - freed + attention, again + feed_forward, inner)
    return _backward(kept, late + attention, again - late + feed_forward, inner)


def _routed_bytes(model: Model, trainer: Trainer) -> tuple[int, int]:
    moe, c = model.mixture, DTYPE_BYTES[trainer.compute_dtype]
    slots = c * moe.num_experts_per_token
    return slots * moe.expert_intermediate_size, slots * model.hidden_size


def _backward(kept: int, attention: int, feed_forward: int, inner: int) -> ActivationBytes:
    # The down projection's input and its gradient are freed before gate and up get gradients.
    late = max(attention, feed_forward - 2 * inner)
    return ActivationBytes(kept, max(attention, feed_forward), late)


def activation_bytes_of_blocks(model: Model, trainer: Trainer) -> list[ActivationBytes]:
    layers = range(model.num_layers)
    memory = trainer.memory
    kinds = [
        (is_sparse(model, i), memory.checkpoints(i), memory.recomputed_modules(i)) for i in layers
    ]
    first = {kind: kinds.index(kind) for kind in kinds}
    found = {kind: activation_bytes(model, trainer, layer) for kind, layer in first.items()}
    return [found[kind] for kind in kinds]


def _results(model: Model, trainer: Trainer, layer: int) -> _Results:
    c, hidden = DTYPE_BYTES[trainer.compute_dtype], model.hidden_size
    h, g = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    adapted = () if trainer.lora is None else trainer.lora.targets
    rank = 0 if trainer.lora is None else trainer.lora.rank

    def copies(target: str) -> int:
        return 2 if target in adapted and trainer.memory.checkpoints(layer) else 1

    def reads_input(target: str) -> bool:
        return trainer.lora is None or target in adapted

    def narrow(target: str, count: int) -> int:
        return c * rank * count if target in adapted else 0

    named = {"attention": c * h + 4 * model.num_heads, "experts": 0}
    inputs = c * (h + 2 * g) * copies("attention") + narrow("attention", 3)
    gathered, heads = 0, inputs if trainer.mesh.cp == 1 else 0
    if model.mla is not None:
        named["attention"], inputs, gathered, heads = _latent_results(model, trainer)
        if not trainer.memory.activation_offload:
            named["attention"], gathered = named["attention"] + gathered, 0
    named["projections"] = inputs + c * hidden * copies("attention") + narrow("attention", 1)
    unread = {"attention": 0, "projections": 0, "experts": 0}
    norms = c * hidden * reads_input("attention")
    rest = norms + 8 + gathered
    if model.qk_norm:
        normed = c * (h + g) + 4 * (model.num_heads + model.num_kv_heads)
        rest, heads = rest + normed, heads + normed
    for_attention = rest + (0 if "projections" in trainer.kept else inputs)
    dense = _dense_width(model, layer)
    if dense:
        named["projections"] += c * 2 * dense * copies("feed_forward") + narrow("feed_forward", 3)
        unread["projections"] += c * hidden
        rest += c * dense * (reads_input("feed_forward") + (not trainer.compile))
    modules = trainer.memory.recomputed_modules(layer)
    of_attention = {"norms": norms, "attention_projections": heads}
    if trainer.compile and model.mla is None and "attention_projections" in modules:
        of_attention["norms"] = 0  # kept, because the compiler saves inputs of recomputed modules
    norms = c * hidden * (reads_input("feed_forward") or not dense)
    rest += norms
    of_feed_forward = {"norms": norms}
    if is_sparse(model, layer):
        moe = model.mixture
        top_k, inner = moe.num_experts_per_token, moe.expert_intermediate_size
        named["projections"] += 4 * moe.num_experts
        named["experts"] = c * top_k * 2 * inner + narrow("experts", 2 * top_k)
        unread["experts"] = c * top_k * hidden
        rest += c * top_k * (hidden + inner) * reads_input("experts") + 20 * top_k + 8
        rest += 4 * moe.num_experts * (not trainer.compile)
        if trainer.compile and "router" in modules:
            of_feed_forward["norms"] = 0
        of_feed_forward["router"] = 4 * (moe.num_experts + 3 * top_k + (not trainer.compile))
        of_feed_forward["experts_activation"] = c * top_k * inner * reads_input("experts")
    late, early = (
        [num_bytes for name, num_bytes in parts.items() if name in modules]
        for parts in (of_attention, of_feed_forward)
    )
    return _Results(named, unread, rest, for_attention, late, early)


def _latent_results(model: Model, trainer: Trainer) -> tuple[int, int, int, int]:
    """Return latent attention's bytes per token: (output, inputs, gathered keys, recomputed).

    `output` includes float32 log-sum-exps. With an indexer, attention is sparse. `recomputed`:
    inputs that recomputation of "attention_projections" frees.
    """
    mla, heads, cp = model.latent, model.num_heads, trainer.mesh.cp
    c = DTYPE_BYTES[trainer.compute_dtype]
    latent, keys = mla.kv_lora_rank + mla.rope_head_dim, keys_per_query(model, cp)
    both = c * (2 * mla.q_lora_rank + 2 * latent + heads * model.head_dim)
    gathered = 0
    if cp > 1:
        both, gathered = both - c * latent, round(c * latent * keys)
    head = max(model.head_dim, mla.value_head_dim)
    width, of_path = mla.value_head_dim, round(c * heads * head * (1 + 2 * keys))
    recomputed = of_path
    if mla.indexer is not None:
        width, recomputed = mla.kv_lora_rank, c * heads * latent
        of_path = recomputed + 4 * mla.indexer.top_k
    recomputed += c * heads * (model.head_dim - mla.rope_head_dim * trainer.compile)
    return c * heads * width + 4 * heads, both + of_path, gathered, recomputed


def _dense_width(model: Model, layer: int) -> int:
    if not is_sparse(model, layer):
        return model.intermediate_size
    return model.mixture.num_shared_experts * model.mixture.expert_intermediate_size


def _temporaries(model: Model, trainer: Trainer, layer: int) -> tuple[int, int]:
    """Return temporary bytes per token of the backward pass: (attention, feed-forward)."""
    c = DTYPE_BYTES[trainer.compute_dtype]
    h, g = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = c * (3 * h + 2 * g) + 4 * h  # gradients, and float32 sums of query gradients
    if (mla := model.mla) is not None:
        keys, gathered = keys_per_query(model, trainer.mesh.cp), 0
        if trainer.mesh.cp > 1:
            gathered = round(3 * c * keys * (mla.kv_lora_rank + mla.rope_head_dim))
            attention += round(2 * c * g * (keys - 1))
        attention = gathered + (_sparse_gradients(model, c) or attention)
    dense = _dense_width(model, layer)
    if not is_sparse(model, layer):
        return attention, c * (3 * dense + 2 * model.hidden_size)
    moe, lora = model.mixture, trainer.lora
    rows = 1 if trainer.mesh.ep == 1 else 3  # expert parallelism adds two copies of each row
    gradient = moe.expert_intermediate_size
    if lora is not None and "experts" in lora.targets:
        if trainer.memory.checkpoints(layer) and "experts" not in trainer.kept:
            # The recomputed output of the down projection may exceed the gradient of its input.
            gradient = max(gradient, model.hidden_size)
        gradient += lora.rank
    per_slot = rows * model.hidden_size + gradient
    shared = 3 * dense + model.hidden_size if dense else 0
    return attention, c * (shared + moe.num_experts_per_token * per_slot)


def _sparse_gradients(model: Model, c: int) -> int:
    """Return bytes per token of sparse attention's gradients of absorbed queries and outputs."""
    mla = model.latent
    if mla.indexer is None:
        return 0
    return c * model.num_heads * (2 * mla.kv_lora_rank + mla.rope_head_dim)


def sparse_backward_bytes(model: Model, trainer: Trainer, tokens: int) -> int:
    """Return the bytes of (query, chosen key) pairs in sparse attention's backward pass.

    Documents of at most `top_k` tokens use dense attention, so return its further bytes if they are
    more. `tokens`: a rank's queries. The float32 backend stores no pairs.
    """
    mla, c = model.mla, DTYPE_BYTES[trainer.compute_dtype]
    if mla is None or mla.indexer is None or c > 2:
        return 0
    pairs = tokens * mla.indexer.top_k
    width = mla.kv_lora_rank + mla.rope_head_dim + model.num_heads
    pair_bytes = min(pairs, SPARSE_PAIRS) * c * width + 4 * pairs
    if trainer.mesh.cp > 1:
        return pair_bytes
    every = model.model_copy(update={"mla": mla.model_copy(update={"indexer": None})})
    dense, sparse = (
        sum(_latent_results(one, trainer)[:2]) + _temporaries(one, trainer, 0)[0]
        for one in (every, model)
    )
    return max(pair_bytes, tokens * (dense - sparse))
