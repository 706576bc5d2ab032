// Two H200 of one node: one trains, one serves. Weights are float32, products are bfloat16.
(import 'hardware/h200_node.libsonnet') + {
  layout:: { trainer_ranks: 1, engines: 1, prefill_engines: 0, devices_per_engine: 1 },
  hardware+: { num_nodes: 1, devices_per_node: 8 },
}
