// Nodes of eight H200 that compute in bfloat16: twelve train, eight prefill, eight decode. One engine fills one node.
{
  local axis = self,
  layout:: { trainer_ranks: 96, engines: 16, prefill_engines: 8, devices_per_engine: 8 },
  hardware+: {
    accelerator: 'h200',
    // each node has a single role
    num_nodes: std.ceil((axis.layout.trainer_ranks + axis.layout.engines * axis.layout.devices_per_engine) / self.devices_per_node),
    devices_per_node: 8,
  },
  trainer+: { param_dtype: 'float32', compute_dtype: 'bfloat16', reduce_dtype: 'float32' },
  inference+: {
    dtype: 'bfloat16',
    kv_block_tokens: 64,
    kv_cache_bytes: 17179869184,
    max_batched_tokens: 8192,
    enforce_eager: false,
  },
  orchestrator+: { admission: { kind: 'adaptive', min_in_flight: 64, max_in_flight: 512 } },
}
