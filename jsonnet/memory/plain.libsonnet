// Nothing is recomputed or offloaded; the LM head works in chunks all the same.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'none' }, lm_head_chunk_tokens: 2048, max_tokens_per_micro_batch: 4096 },
  },
}
