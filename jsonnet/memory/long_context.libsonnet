// Contexts of 131072 tokens: every layer is recomputed, and the eight devices of a node share one sequence, 16384 tokens each.
{
  trainer+: {
    mesh+: { cp: 8 },
    memory+: { activation_checkpointing: { kind: 'full' }, lm_head_chunk_tokens: 1024, max_tokens_per_micro_batch: 131072 },
  },
}
