// The demo's task with a mixture-of-experts policy.
(import 'lib/named.libsonnet')({
  reverse_text_moe:
    (import 'lib/run.libsonnet') +
    (import 'models/qwen3_moe_tiny.libsonnet') +
    (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/reverse_text.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      trainer+: { checkpoint+: { interval_steps: 10 } },
      orchestrator+: {
        rollouts_per_batch: 128,
        evaluation+: { interval_steps: 5, num_problems: 64, rollouts_per_problem: 1 },
      },
      stages+: {
        sft+: {
          num_steps: 45,
          examples_per_batch: 32,
          optimizer+: { lr: 2e-3 },
          schedule: { kind: 'constant', warmup_steps: 10 },
          data+: { num_problems: 4096 },
        },
        rl+: { num_steps: 30 },
        evaluate+: { num_problems: 128 },
      },
    },
  // One engine prefills on a node, one decodes on two nodes with a rank each, and the trainer has the fourth node.
  reverse_text_moe_wide: self.reverse_text_moe {
    layout+:: { engines: 2, prefill_engines: 1, devices_per_engine: 2 },
    hardware+: { num_nodes: 4, devices_per_node: 1 },
    inference+: {
      nodes_per_replica: 2,
      data_parallel: 2,
      max_restarts: 2,
      prefill: self.shape { nodes_per_replica: 1, data_parallel: 1, expert_parallel: false },
    },
    transport+: { routed_experts: true },
    stages+: { sft+: { num_steps: 70 } },
  },
})
