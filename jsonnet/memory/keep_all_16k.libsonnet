// Micro-batches of 16384 tokens for models that leave much memory: nothing is recomputed on purpose, weights stay gathered for the backward pass.
{
  trainer+: {
    fsdp+: { reshard_after_forward: false },
    memory+: {
      activation_checkpointing: { kind: 'none' },
      lm_head_chunk_tokens: 'auto',
      lm_head_keeps_logits: true,
      max_tokens_per_micro_batch: 16384,
    },
  },
}
