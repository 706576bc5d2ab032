// The demo's task with a mixture for a few steps: expert-parallel trainer ranks send weights directly to two engines.
(import 'lib/named.libsonnet')({
  reverse_text_direct:
    (import 'runs/reverse_text_moe.jsonnet').reverse_text_moe {
      layout+:: { trainer_ranks: 2, engines: 2 },
      trainer+: { mesh+: { ep: 2 }, checkpoint+: { interval_steps: 4 } },
      transport+: { weights: 'nccl' },
      orchestrator+: { rollouts_per_batch: 64, evaluation+: { interval_steps: 4, num_problems: 32 } },
      stages+: {
        sft+: { num_steps: 4, data+: { num_problems: 256 } },
        rl+: { num_steps: 8 },
        evaluate+: { num_problems: 32 },
      },
    },
})
