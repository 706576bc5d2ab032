// One H100 that trains and serves at once. Weights are float32, products are bfloat16.
(import 'hardware/h200_pair.libsonnet') + { hardware+: { accelerator: 'h100', devices_per_node: 1, shared_devices: true } }
