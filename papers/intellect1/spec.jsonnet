// INTELLECT-1 (arXiv 2412.01152) at the size of two cores: its H, outer step and codec, at four sites.
(import 'runs/elastic_text.jsonnet').elastic_text {
  name: 'intellect1',
  model+: { hidden_size: 64, intermediate_size: 128, num_heads: 4, num_kv_heads: 2, head_dim: 16 },
  trainer+: {
    elastic+: {
      min_sites: 4,
      inner_steps: 100,
      outer: { lr: 0.7, momentum: 0.9, nesterov: true },
      codec: 'int8_codebook',
    },
    checkpoint+: { interval_steps: 100 },
  },
  orchestrator+: { evaluation+: { interval_steps: 100 } },
  stages+: {
    sft+: {
      num_steps: 600,
      optimizer+: { lr: 2e-3 },
      schedule: { kind: 'linear', warmup_steps: 0, final_fraction: 0 },
    },
    rl+: { num_steps: 100 },
  },
}
