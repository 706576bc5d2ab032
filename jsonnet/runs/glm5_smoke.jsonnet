// SFT of a tiny GLM-5 and its indexers on a CPU. RL needs a GPU, because vLLM's sparse attention runs only there.
(import 'lib/named.libsonnet')({
  glm5_smoke:
    (import 'lib/run.libsonnet') +
    (import 'models/glm5_tiny.libsonnet') +
    (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/reverse_text.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      model+: { mla+: { indexer+: { top_k: 8 } } },  // fewer than the 20 tokens of a document, so attention is sparse
      trainer+: {
        indexer: 'train',
        checkpoint+: { interval_steps: 10 },
      },
      orchestrator+: {
        rollouts_per_batch: 128,
        evaluation+: { interval_steps: 5, num_problems: 64, rollouts_per_problem: 1 },
      },
      stages+: {
        sft+: {
          num_steps: 30,
          examples_per_batch: 32,
          optimizer+: { lr: 2e-3 },
          schedule: { kind: 'constant', warmup_steps: 10 },
          data+: { num_problems: 4096 },
        },
        rl+: { num_steps: 30 },
        evaluate+: { num_problems: 128 },
      },
    },
})
