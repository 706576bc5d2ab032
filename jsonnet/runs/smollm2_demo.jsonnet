// `make demo` on a machine with a GPU: a pretrained model of 135 M parameters learns to reverse the order of words, in bfloat16.
// Both roles share one device.
(import 'lib/named.libsonnet')({
  smollm2_demo:
    (import 'lib/run.libsonnet') +
    (import 'models/smollm2_135m.libsonnet') +
    (import 'hardware/one_h100.libsonnet') +
    (import 'algorithms/finetune.libsonnet') +
    (import 'tasks/smollm2_reverse_words.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      // A short run: compiling and capturing graphs would take longer than they save.
      trainer+: {
        compile: false,
        memory+: { lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 8192 },
        checkpoint+: { interval_steps: 10 },
      },
      inference+: { enforce_eager: true, kv_cache_bytes: 4294967296 },
      orchestrator+: {
        rollouts_per_batch: 256,
        admission: { kind: 'fixed', max_in_flight: 512 },
        evaluation+: { interval_steps: 5, num_problems: 128, rollouts_per_problem: 1 },
      },
      transport+: { weights: 'nccl' },
      stages+: { sft: null, rl+: { num_steps: 25 }, evaluate+: { num_problems: 512 } },
    },
})
