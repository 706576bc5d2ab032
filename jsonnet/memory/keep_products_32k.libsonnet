// Micro-batches of 32768 tokens; experts are recomputed, products of attention stay.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'selective', keep: ['attention', 'projections'] }, lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 32768 },
  },
}
