// prime-rl's recipe for the least device memory (its docs/memory_usage.md), for a model or a context that nothing else fits: experts over the
// eight devices of a node, a context over two of them, and micro-batches of which only two blocks' inputs are on the device at a time.
// It costs exchanges of tokens in every layer, a third more work (blocks run again whole), two copies of each block's input over PCIe for every
// micro-batch and of all optimizer states for every step (8 bytes a parameter each way), a second gather of the weights, and products of the LM
// head too small to be fast. A dense model, or fewer than eight trainer ranks, has another `ep`: the run file says it.
// `fsdp.cpu_offload` is left out: with it the optimizer steps on the host, many times slower; before that, take more devices or a larger `cp`.
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
      max_tokens_per_micro_batch: 16384,  // of one context; a run file with a longer one says it
    },
  },
}
