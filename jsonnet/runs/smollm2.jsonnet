// A pretrained model of 135 M parameters learns three tasks, each with three seeds. One H200 trains, one serves.
local base =
  (import 'lib/run.libsonnet') +
  (import 'models/smollm2_135m.libsonnet') +
  (import 'hardware/h200_pair.libsonnet') +
  (import 'algorithms/finetune.libsonnet') +
  (import 'memory/plain.libsonnet') + {
    // Two devices, and short runs: compiling and capturing graphs would take longer than they save here.
    hardware+: { devices_per_node: 2 },
    // float32 on both sides, so that engine and trainer differ in staleness only.
    trainer+: {
      compile: false,
      compute_dtype: 'float32',
      memory+: { lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 8192 },
      checkpoint+: { interval_steps: 50 },
    },
    inference+: { enforce_eager: true, dtype: 'float32', kv_cache_bytes: 8589934592 },
    orchestrator+: {
      rollouts_per_batch: 256,
      admission: { kind: 'fixed', max_in_flight: 512 },
      evaluation+: { interval_steps: 5, num_problems: 128, rollouts_per_problem: 1 },
    },
    stages+: { sft: null, evaluate+: { num_problems: 512 } },
  };
// Enough steps to learn each task. Once nearly all rollouts are right, few groups have a signal.
local steps = { reverse_words: 40, arithmetic: 60, calculator: 15 };
local tasks = {
  reverse_words: import 'tasks/smollm2_reverse_words.libsonnet',
  arithmetic: import 'tasks/smollm2_arithmetic.libsonnet',
  calculator: import 'tasks/smollm2_calculator.libsonnet',
};
(import 'lib/named.libsonnet')({
  ['smollm2_%s_seed_%d' % [task, seed]]: base + tasks[task] + { seed: seed, stages+: { rl+: { num_steps: steps[task] } } }
  for task in std.objectFields(tasks)
  for seed in std.range(1, 3)
})
