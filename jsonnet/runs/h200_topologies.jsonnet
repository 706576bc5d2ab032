// Shapes of engines on two H200, a few minutes each: separate prefill, caches in host memory and on disk, and expert parallelism. The first
// two also with router replay. Set CUDA_VISIBLE_DEVICES as noted below (engines first) to put the trainer beside an engine.
local pair = (import 'lib/run.libsonnet') + (import 'hardware/h200_pair.libsonnet') + (import 'memory/plain.libsonnet') + {
  seed: 1,
  hardware+: { devices_per_node: 3 },
  trainer+: { checkpoint+: { interval_steps: $.stages.rl.num_steps } },
  inference+: { kv_block_tokens: 16, kv_cache_bytes: 8589934592 },
  transport+: { weights: 'nccl' },
  orchestrator+: { admission: { kind: 'fixed', max_in_flight: 256 }, evaluation+: { interval_steps: 4, num_problems: 64 } },
  stages+: { sft: null, rl+: { num_steps: 4 }, evaluate+: { num_problems: 64 } },
};
local smollm2 = pair + (import 'models/smollm2_135m.libsonnet') + (import 'algorithms/finetune.libsonnet') + (import 'tasks/smollm2_calculator.libsonnet') + {
  trainer+: { memory+: { max_tokens_per_micro_batch: 8192 } },
  orchestrator+: { rollouts_per_batch: 256, evaluation+: { rollouts_per_problem: 1 } },
};
// four layers of Qwen3-30B-A3B. The trainer replays the engines' routes
local mixture = pair + (import 'models/qwen3_30b_a3b.libsonnet') + (import 'algorithms/grpo.libsonnet') + (import 'tasks/lengths.libsonnet') + {
  answer_tokens:: { median: 64, max: 1024 },
  model+: { num_layers: 4 },
  trainer+: { optimizer+: { lr: 1e-6 }, memory+: { max_tokens_per_micro_batch: 8192 } },
  transport+: { routed_experts: true },
  orchestrator+: { rollouts_per_batch: 256, drop_zero_advantage_groups: false, evaluation+: { rollouts_per_problem: 1 } },
};
(import 'lib/named.libsonnet')({
  // 0,1,1: one engine prefills, one decodes
  h200_prefill_decode: smollm2 {
    layout+:: { engines: 2, prefill_engines: 1 },
    inference+: { router: { kind: 'none' } },
  },
  // a cache for about 60 rollouts, and 256 in flight
  h200_kv_tiers: smollm2 {
    hardware+: { devices_per_node: 2 },
    inference+: { kv_cache_bytes: 50331648, kv_offload: { kind: 'tiers', host_bytes: 1073741824, disk_bytes: 4294967296 } },
  },
  // 0,1,1: two ranks, each with its own requests and half of the experts
  h200_data_parallel: mixture {
    layout+:: { devices_per_engine: 2 },
    inference+: { data_parallel: 2 },
  },
  // 0,1,1: a token's route comes from the engine that computed it
  h200_prefill_decode_mixture: mixture {
    layout+:: { engines: 2, prefill_engines: 1 },
    inference+: { router: { kind: 'none' } },
  },
  // a preempted prompt's cache returns from host memory or disk, with its routes
  h200_kv_tiers_mixture: mixture {
    hardware+: { devices_per_node: 2 },
    inference+: { kv_cache_bytes: 67108864, kv_offload: { kind: 'tiers', host_bytes: 1073741824, disk_bytes: 4294967296 } },
  },
})
