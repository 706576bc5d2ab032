// Micro-batches of 16384 tokens for small models: all activations are kept, and weights stay gathered for the backward pass.
{
  trainer+: {
    // whole float32 gradients would not fit beside an 8B model
    fsdp+: { reshard_after_forward: false, reduce_gradients: 'micro_batch' },
    memory+: {
      activation_checkpointing: { kind: 'none' },
      lm_head_chunk_tokens: 'auto',
      lm_head_keeps_logits: true,
      max_tokens_per_micro_batch: 16384,
    },
  },
}
