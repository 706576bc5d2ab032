// The three tasks of the pretrained model, all stages, two steps on two CPU cores.
local tasks = [
  import 'tasks/smollm2_reverse_words.libsonnet',
  import 'tasks/smollm2_arithmetic.libsonnet',
  import 'tasks/smollm2_calculator.libsonnet',
];
(import 'lib/named.libsonnet')({
  smollm2_smoke:
    (import 'lib/run.libsonnet') +
    (import 'models/smollm2_135m.libsonnet') +
    (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/finetune.libsonnet') +
    (import 'memory/plain.libsonnet') +
    tasks[0] + {
      seed: 1,
      problems:: [task.problems[0] for task in tasks],
      trainer+: { memory+: { max_tokens_per_micro_batch: 1024, lm_head_chunk_tokens: 256 }, checkpoint+: { interval_steps: 2 } },
      orchestrator+: {
        algorithm+: { group_size: 4 },
        rollouts_per_batch: 16,
        admission: { kind: 'fixed', max_in_flight: 16 },
        rollout_timeout_s: 600,
        evaluation+: { interval_steps: 2, num_problems: 4, rollouts_per_problem: 1 },
      },
      stages+: { sft: null, rl+: { num_steps: 2 }, evaluate+: { num_problems: 4 } },
    },
})
