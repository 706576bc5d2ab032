// Micro-batches of 16384 tokens; what is recomputed costs bytes and no products.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'selective', keep: ['attention', 'projections', 'experts'] }, lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 16384 },
  },
}
