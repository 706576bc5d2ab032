// Plain text at three to six sites of one CPU process each. `make demo-elastic` starts them on this machine.
(import 'lib/named.libsonnet')({
  elastic_text:
    (import 'lib/run.libsonnet') +
    (import 'models/qwen3_tiny.libsonnet') +
    (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/reverse_text.libsonnet') +
    (import 'memory/plain.libsonnet') +
    (import 'elastic/diloco.libsonnet') + {
      seed: 1,
      trainer+: {
        elastic+: { min_sites: 3, max_sites: 6, inner_steps: 10, quorum: 2, grace_s: 20 },
        checkpoint+: { interval_steps: 30 },
      },
      orchestrator+: {
        rollouts_per_batch: 64,
        evaluation+: { interval_steps: 10, num_problems: 64, rollouts_per_problem: 1 },
      },
      stages+: {
        sft+: {
          num_steps: 110,
          examples_per_batch: 4,
          optimizer+: { lr: 1e-3 },
          schedule: { kind: 'linear', warmup_steps: 10, final_fraction: 0.1 },
          data: {
            kind: 'text',
            path: 'datasets/elastic_text.jsonl',
            split: null,
            column: 'text',
            sha256: 'dfb61851c9c29c185b7453e905ebd860a0d9935c80985055527ca5d5ac59eea7',
            num_shards: 8,
          },
        },
        rl+: { num_steps: 10 },
        evaluate+: { num_problems: 64 },
      },
    },
})
