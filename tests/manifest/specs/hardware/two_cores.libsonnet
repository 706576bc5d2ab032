{
  layout:: { trainer_ranks: 1, engines: 1, prefill_engines: 0, devices_per_engine: 1 },
  hardware+: { accelerator: 'cpu', num_nodes: 1, devices_per_node: 2 },
  trainer+: { param_dtype: 'float32', compute_dtype: 'float32', reduce_dtype: 'float32', compile: false },
  inference+: { dtype: 'float32', kv_block_tokens: 32, kv_cache_bytes: 1048576, max_batched_tokens: 256, enforce_eager: true },
  orchestrator+: { admission: { kind: 'fixed', max_in_flight: 16 } },
}
