// A pretrained model of 135 M parameters learns three tasks, each under three seeds: one H200 trains, one serves.
local base =
  (import 'lib/run.libsonnet') +
  (import 'models/smollm2_135m.libsonnet') +
  (import 'hardware/h200_pair.libsonnet') +
  (import 'algorithms/finetune.libsonnet') +
  (import 'memory/plain.libsonnet') + {
    // Two devices, and short runs: compiling and capturing graphs would take longer than they save here.
    hardware+: { devices_per_node: 2 },
    trainer+: {
      compile: false,
      memory+: { lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 16384 },
      checkpoint+: { interval_steps: 50 },
    },
    inference+: { enforce_eager: true },
    orchestrator+: {
      rollouts_per_batch: 256,
      admission: { kind: 'fixed', max_in_flight: 512 },
      evaluation: { interval_steps: 10, num_problems: 128, rollouts_per_problem: 1 },
    },
    stages+: { sft: null, rl+: { num_steps: 200 }, evaluate+: { num_problems: 512 } },
  };
local tasks = {
  reverse_words: import 'tasks/smollm2_reverse_words.libsonnet',
  arithmetic: import 'tasks/smollm2_arithmetic.libsonnet',
  calculator: import 'tasks/smollm2_calculator.libsonnet',
};
(import 'lib/named.libsonnet')({
  ['smollm2_%s_seed_%d' % [task, seed]]: base + tasks[task] + { seed: seed }
  for task in std.objectFields(tasks)
  for seed in std.range(1, 3)
})
