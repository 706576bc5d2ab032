"""Placements that the families share, as data: names of modules and parameters, read by `orrery.trainer.parallel`.

- `FSDP_UNITS`: each entry is one `fully_shard` call, in this order, before the root's own; `*` stands for every layer; several names in
  an entry are gathered together; a name that the module does not have (the LM head of a tied model) is left out.
- Tied embeddings are read at both ends of the network, so their unit is the root: `TIED_FSDP_UNITS`.
- Mixed precision must leave inputs as they are (`cast_forward_inputs=False`): temperatures are float32 and stay so; the embedding
  speaks the compute dtype.
- A family's `EXPERT_MODULES`: modules all of whose parameters have the expert as dimension 0; units of their own where experts are
  spread out.
"""

FSDP_UNITS: tuple[tuple[str, ...], ...] = (("embed_tokens",), ("layers.*",), ("norm", "lm_head"))
TIED_FSDP_UNITS: tuple[tuple[str, ...], ...] = (("layers.*",),)
