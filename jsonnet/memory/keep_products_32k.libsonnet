// Micro-batches of 32768 tokens. Experts are recomputed, attention's products are kept.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'selective', keep: ['attention', 'projections'] }, lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 32768 },
  },
}
