// Micro-batches of 65536 tokens. Only attention's outputs are kept.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'selective', keep: ['attention'] }, lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 65536 },
  },
}
