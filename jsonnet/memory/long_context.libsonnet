// Contexts of 131072 tokens: every layer is recomputed, the eight devices of a node share one sequence (16384 tokens each),
// and optimizer state is in host memory.
{
  trainer+: {
    mesh+: { cp: 8 },
    memory+: {
      activation_checkpointing: { kind: 'full' },
      optimizer_offload: true,
      lm_head_chunk_tokens: 1024,
      max_tokens_per_micro_batch: 131072,
    },
  },
}
