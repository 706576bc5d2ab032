// No recomputation and no offload. The LM head still works in chunks.
{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'none' }, lm_head_chunk_tokens: 2048, max_tokens_per_micro_batch: 4096 },
  },
}
