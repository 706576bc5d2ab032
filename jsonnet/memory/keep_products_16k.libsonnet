// Micro-batches of 16384 tokens. Norms, rotations and activations are recomputed, matrix products are kept.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'selective', keep: ['attention', 'projections', 'experts'] }, lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 16384 },
  },
}
