// GLM-4.5-Air with a context of 32768 tokens: training of all weights on eight nodes, or of adapters on two.
// The digests here are zeros. `orrery fetch model zai-org/GLM-4.5-Air` writes a model axis with the real ones.
local run =
  (import 'lib/run.libsonnet') +
  (import 'models/glm4_5_air.libsonnet') +
  (import 'hardware/h200.libsonnet') +
  (import 'algorithms/grpo.libsonnet') +
  (import 'tasks/countdown.libsonnet') +
  (import 'memory/keep_attention_64k.libsonnet') + {
    local weights = { kind: 'pretrained', path: 'weights/GLM-4.5-Air', sha256: std.repeat('0', 64) },
    seed: 1,
    model+: { init: weights { revision: 'main' }, tokenizer: weights },
    context_tokens:: 32768,
    trainer+: {
      fsdp+: { reduce_gradients: 'micro_batch' },
      memory+: { max_tokens_per_micro_batch: 32768 },
      optimizer+: { lr: 1e-6 },
      checkpoint+: { interval_steps: 50 },
    },
    inference+: { max_num_sequences: 128, max_restarts: 16 },
    orchestrator+: {
      algorithm+: { group_size: 16 },
      rollouts_per_batch: 256,
      max_off_policy_steps: 10,  // the longest rollout starts 9 versions before its batch
      sampling+: { max_tokens_per_turn: $.context_tokens - 1024 },
      evaluation+: { interval_steps: 20, num_problems: 64, rollouts_per_problem: 1 },
    },
    transport+: { weights: 'nccl', routed_experts: true },
    stages+: { sft: null, rl+: { num_steps: 500 }, evaluate+: { num_problems: 256 } },
  };

(import 'lib/named.libsonnet')({
  // four nodes train all weights, four serve with two engines per node
  glm4_5_air_8: run {
    layout+:: { trainer_ranks: 32, engines: 8, prefill_engines: 0, devices_per_engine: 4 },
    trainer+: { memory+: { optimizer_offload: true } },
    inference+: { kv_cache_bytes: 64424509440 },
  },
  // one node trains adapters, one serves with two engines
  glm4_5_air_2: run {
    layout+:: { trainer_ranks: 8, engines: 2, prefill_engines: 0, devices_per_engine: 4 },
    trainer+: { lora: { rank: 16, alpha: 32.0, targets: ['attention', 'experts'], seed: 1 }, optimizer+: { lr: 1e-5 } },
    inference+: { kv_cache_bytes: 64424509440 },
  },
})
