// Micro-batches of 16384 tokens for models that leave much memory: nothing is recomputed on purpose, weights stay gathered for the backward pass.
{
  trainer+: {
    // whole float32 gradients of several micro-batches would not fit beside 8B
    fsdp+: { reshard_after_forward: false, reduce_gradients: 'micro_batch' },
    memory+: {
      activation_checkpointing: { kind: 'none' },
      lm_head_chunk_tokens: 'auto',
      lm_head_keeps_logits: true,
      max_tokens_per_micro_batch: 16384,
    },
  },
}
