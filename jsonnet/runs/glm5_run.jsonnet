// GLM-5 with a context of 131072 tokens on 28 nodes: 12 train, 8 prefill, 8 decode.
(import 'lib/named.libsonnet')({
  glm5_run:
    (import 'lib/run.libsonnet') +
    (import 'models/glm5.libsonnet') +
    (import 'hardware/h200.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/countdown.libsonnet') +
    (import 'memory/long_context.libsonnet') + {
      seed: 1,
      trainer+: {
        mesh+: { ep: 8 },
        optimizer+: { lr: 1e-6 },
        checkpoint+: { interval_steps: 50 },
      },
      // caches of 131072 tokens leave room for few sequences at a time
      inference+: { max_num_sequences: 96, max_restarts: 16 },
      orchestrator+: {
        algorithm+: { group_size: 16 },
        rollouts_per_batch: 256,
        max_off_policy_steps: 8,
        evaluation+: { interval_steps: 20, num_problems: 64, rollouts_per_problem: 1 },
      },
      transport+: { weights: 'nccl' },
      stages+: {
        sft: null,
        rl+: { num_steps: 1000 },
        evaluate+: { num_problems: 256 },
      },
    },
})
