{
  trainer+: {
    memory+: { activation_checkpointing: { kind: 'none' }, lm_head_chunk_tokens: 64, max_tokens_per_micro_batch: 256 },
  },
}
