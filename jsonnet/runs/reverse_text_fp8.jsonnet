// The demo's task on one H200 that trains and serves at once, with layers in FP8 on both sides, and in bfloat16. Three seeds each.
local run(seed, fp8) =
  (import 'lib/run.libsonnet') +
  (import 'models/qwen3_tiny.libsonnet') +
  (import 'hardware/one_h200.libsonnet') +
  (import 'algorithms/grpo.libsonnet') +
  (import 'tasks/reverse_text.libsonnet') +
  (import 'memory/plain.libsonnet') + {
    local demo = (import 'runs/reverse_text.jsonnet').reverse_text,
    seed: seed,
    model+: { fp8: fp8 },
    trainer+: { fsdp+: { reduce_gradients: 'micro_batch' }, checkpoint: demo.trainer.checkpoint },
    orchestrator+: {
      rollouts_per_batch: demo.orchestrator.rollouts_per_batch,
      evaluation+: {
        [field]: demo.orchestrator.evaluation[field]
        for field in ['interval_steps', 'num_problems', 'rollouts_per_problem']
      },
    },
    stages+: demo.stages,
  };
(import 'lib/named.libsonnet')(
  { ['reverse_text_h200_seed_%d' % seed]: run(seed, null) for seed in std.range(1, 3) } +
  { ['reverse_text_h200_fp8_seed_%d' % seed]: run(seed, ['attention', 'feed_forward']) for seed in std.range(1, 3) }
)
