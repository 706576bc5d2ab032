// The demo: a policy of 1.6 M parameters learns to reverse words by SFT and asynchronous RL on two CPU cores.
(import 'lib/named.libsonnet')({
  reverse_text:
    (import 'lib/run.libsonnet') +
    (import 'models/qwen3_tiny.libsonnet') +
    (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/reverse_text.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      trainer+: { checkpoint+: { interval_steps: 10 } },
      orchestrator+: {
        rollouts_per_batch: 256,
        evaluation+: { interval_steps: 10, num_problems: 128, rollouts_per_problem: 1 },
      },
      stages+: {
        sft+: {
          num_steps: 25,
          examples_per_batch: 64,
          optimizer+: { lr: 1e-3 },
          schedule: { kind: 'linear', warmup_steps: 10, final_fraction: 0.1 },
          data+: { num_problems: 4096 },
        },
        rl+: { num_steps: 100 },
        evaluate+: { num_problems: 256 },
      },
    },
})
