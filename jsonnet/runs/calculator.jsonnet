// Several turns with a tool: sums with a calculator, on two CPU cores.
(import 'lib/named.libsonnet')({
  calculator:
    (import 'lib/run.libsonnet') +
    (import 'models/qwen3_tiny.libsonnet') +
    (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/calculator.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      trainer+: { checkpoint+: { interval_steps: 10 } },
      orchestrator+: {
        rollouts_per_batch: 64,
        evaluation+: { interval_steps: 5, num_problems: 32, rollouts_per_problem: 1 },
      },
      stages+: {
        sft+: {
          num_steps: 70,
          examples_per_batch: 16,
          optimizer+: { lr: 2e-3 },
          schedule: { kind: 'constant', warmup_steps: 10 },
          data+: { num_problems: 4096 },
        },
        rl+: { num_steps: 40 },
        evaluate+: { num_problems: 64 },
      },
    },
})
