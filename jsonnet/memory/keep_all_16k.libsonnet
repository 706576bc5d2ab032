// Micro-batches of 16384 tokens, nothing recomputed on purpose.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'none' }, lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 16384 },
  },
}
