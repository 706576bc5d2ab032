// Router replay: a trainer in float32 uses the experts that an engine in bfloat16 chose.
(import 'lib/named.libsonnet')({
  reverse_text_moe_replay:
    (import 'lib/run.libsonnet') +
    (import 'models/qwen3_moe_tiny.libsonnet') +
    (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/reverse_text.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      trainer+: { checkpoint+: { interval_steps: 10 } },
      inference+: { dtype: 'bfloat16' },
      transport+: { routed_experts: true },
      orchestrator+: {
        rollouts_per_batch: 256,
        max_off_policy_steps: 0,  // one version per rollout, so engine and trainer differ in arithmetic only
        evaluation+: { interval_steps: 2, num_problems: 32, rollouts_per_problem: 1 },
      },
      stages+: {
        sft+: {
          num_steps: 70,
          examples_per_batch: 32,
          optimizer+: { lr: 2e-3 },
          schedule: { kind: 'constant', warmup_steps: 10 },
          data+: { num_problems: 4096 },
        },
        rl+: { num_steps: 4 },
        evaluate+: { num_problems: 64 },
      },
    },
})
