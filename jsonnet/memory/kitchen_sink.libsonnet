// prime-rl's recipe for the least device memory (its docs/memory_usage.md), for large models and contexts: experts over the
// eight devices of a node, a context over two of them, and the inputs of only two blocks on the device at a time.
// Cost: token exchanges in every layer, a third more work (recomputed blocks), two copies of each block's input over PCIe for every
// micro-batch and of all optimizer states for every step (8 bytes a parameter each way), a second gather of the weights, and products of the LM
// head too small to be fast. For dense models, or fewer than eight trainer ranks, the run file sets another `ep`.
// Without `fsdp.cpu_offload`, which makes the optimizer step many times slower; prefer more devices or a larger `cp`.
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
      max_tokens_per_micro_batch: 16384,  // one context; a run file with a longer one sets it
    },
  },
}
