(import 'lib/named.libsonnet')({
  words:
    (import 'lib/run.libsonnet') +
    (import 'models/dense.libsonnet') +
    (import 'hardware/two_cores.libsonnet') +
    (import 'algorithms/groups.libsonnet') +
    (import 'tasks/words.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      trainer+: { checkpoint+: { interval_steps: 2 } },
      orchestrator+: {
        rollouts_per_batch: 8,
        evaluation: { interval_steps: 2, num_problems: 4, rollouts_per_problem: 1, stop_at: null },
      },
      stages+: {
        sft+: { num_steps: 2, examples_per_batch: 4, data+: { num_problems: 16 } },
        rl+: { num_steps: 4 },
        evaluate+: { num_problems: 8 },
      },
    },
})
