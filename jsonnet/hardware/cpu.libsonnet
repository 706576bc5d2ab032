// One machine of 2 cores without an accelerator: one engine and one trainer rank in float32. A run file may set more of each.
{
  layout:: { trainer_ranks: 1, engines: 1, prefill_engines: 0, devices_per_engine: 1 },
  hardware+: { accelerator: 'cpu', num_nodes: 1, devices_per_node: 2 },
  trainer+: { param_dtype: 'float32', compute_dtype: 'float32', reduce_dtype: 'float32' },
  inference+: {
    dtype: 'float32',
    kv_block_tokens: 32,
    kv_cache_bytes: 268435456,
    max_batched_tokens: 4096,
    enforce_eager: true,
  },
  orchestrator+: { admission: { kind: 'fixed', max_in_flight: 128 } },
}
