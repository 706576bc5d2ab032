// prime-rl's recipe for the least device memory (its docs/memory_usage.md), for large models and contexts: experts over the
// eight devices of a node, a context over two of them, and the inputs of only two blocks on the device at a time.
// It costs token exchanges in every layer, a third more work (recomputed blocks), a second gather of the weights, small products
// in the LM head, and copies over PCIe: each block's input twice a micro-batch, all optimizer states twice a step.
// For dense models, or fewer than eight trainer ranks, the run file sets another `ep`.
// `fsdp.cpu_offload` would make the optimizer step many times slower. Prefer more devices or a larger `cp`.
{
  trainer+: {
    mesh+: { cp: 2, ep: 8 },
    fsdp+: { reshard_after_forward: true, reduce_gradients: 'micro_batch', cpu_offload: false },
    compile: true,
    memory+: {
      activation_checkpointing: { kind: 'full' },
      activation_offload: true,
      optimizer_offload: true,
      lm_head_chunk_tokens: 1024,
      lm_head_keeps_logits: false,
      max_tokens_per_micro_batch: 16384,  // one context. A run file with longer contexts sets it
    },
  },
}
