// Two nodes of eight H200: one trains, one serves. Weights and sums over ranks are float32, products are bfloat16.
{
  layout:: { trainer_ranks: 8, engines: 8, prefill_engines: 0, devices_per_engine: 1 },
  hardware+: { accelerator: 'h200', num_nodes: 2, devices_per_node: 8 },
  trainer+: { param_dtype: 'float32', compute_dtype: 'bfloat16', reduce_dtype: 'float32' },
  inference+: {
    dtype: 'bfloat16',
    kv_block_tokens: 64,
    kv_cache_bytes: 34359738368,
    max_batched_tokens: 8192,
    enforce_eager: false,
  },
  orchestrator+: { admission: { kind: 'fixed', max_in_flight: 256 } },
}
