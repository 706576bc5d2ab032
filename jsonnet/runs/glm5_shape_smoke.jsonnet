// A run on four nodes without GPUs: one prefills, one decodes, two train. A tiny model takes few steps.
(import 'lib/named.libsonnet')({
  glm5_shape_smoke:
    (import 'runs/reverse_text_smoke.jsonnet').reverse_text_smoke {
      layout+:: { prefill_engines: 1 },
      hardware+: { num_nodes: 4, devices_per_node: 1 },
      trainer+: { checkpoint+: { interval_steps: 2 } },
      inference+: { max_restarts: 1 },
      orchestrator+: {
        rollouts_per_batch: 64,
        evaluation+: { interval_steps: 4, num_problems: 16 },
      },
      stages+: {
        sft+: { num_steps: 8, data+: { num_problems: 256 } },
        rl+: { num_steps: 10 },
        evaluate+: { num_problems: 32 },
      },
    },
})
