// The whole loop with random weights and answers of random lengths, on 1, 2, 4 and 8 H200 and, smaller, on two CPU cores. Half of the
// devices train, half serve. Each run has a synchronous twin (bound 0). One run has engines with FP8 weights,
// and one layers in FP8 on both sides. The glm5 shapes have one wide engine: each device attends for its own requests, and experts are cut
// over all of them.
local run =
  (import 'lib/run.libsonnet') +
  (import 'algorithms/grpo.libsonnet') +
  (import 'tasks/lengths.libsonnet') + {
    seed: 1,
    trainer+: { optimizer+: { lr: 1e-6 }, checkpoint+: { interval_steps: $.stages.rl.num_steps } },
    orchestrator+: {
      drop_zero_advantage_groups: false,
      max_off_policy_steps: 4,
      evaluation+: { interval_steps: $.stages.rl.num_steps, num_problems: 1, rollouts_per_problem: 1 },
    },
    stages+: { sft: null, evaluate+: { num_problems: 1 } },
  };
local h200 = (import 'hardware/h200_pair.libsonnet') + {
  answer_tokens:: { median: 200, max: 4032 },
  transport+: { weights: 'nccl' },
  orchestrator+: { rollouts_per_batch: 256, admission: { kind: 'fixed', max_in_flight: 512 } },
  stages+: { rl+: { num_steps: 12 } },
};
// One or two devices hold the whole optimizer state.
local alone = { trainer+: { fsdp+: { reduce_gradients: 'micro_batch' }, memory+: { max_tokens_per_micro_batch: 8192 } } };
// GLM-5's attention in FP8 on both sides, with fewer layers and experts and a narrower residual stream. The trainer replays the engine's
// choices of experts and keys.
local glm5 =
  run + (import 'models/glm5_tiny.libsonnet') + h200 + (import 'memory/plain.libsonnet') + alone + {
    model+: {
      hidden_size: 2048,
      intermediate_size: 4096,
      num_layers: 6,
      num_heads: 64,
      num_kv_heads: 64,
      head_dim: 256,
      max_positions: 8192,
      fp8: ['attention', 'feed_forward', 'experts'],
      moe+: { num_experts: 32, num_experts_per_token: 8, expert_intermediate_size: 1024 },
      mla: (import 'models/glm5.libsonnet').model.mla + { indexer+: { top_k: 512, types: ['full', 'shared', 'full', 'shared', 'full', 'full'] } },
    },
    trainer+: { compile: false, indexer_choice: 'replay', mesh+: { ep: $.layout.trainer_ranks } },
    inference+: { data_parallel: $.layout.devices_per_engine, enforce_eager: true },
    transport+: { routed_experts: true },
  };
local shapes = {
  cpu:
    run + (import 'models/qwen3_tiny.libsonnet') + (import 'hardware/cpu.libsonnet') + (import 'memory/plain.libsonnet') + {
      orchestrator+: { rollouts_per_batch: 64 },
      stages+: { rl+: { num_steps: 16 } },
    },
  h200_1: run + (import 'models/qwen3_0_6b.libsonnet') + h200 + (import 'memory/keep_products_16k.libsonnet') + alone + {
    hardware+: (import 'hardware/one_h200.libsonnet').hardware,
  },
  h200_2: run + (import 'models/qwen3_4b.libsonnet') + h200 + (import 'memory/keep_products_16k.libsonnet') + alone + {
    hardware+: { devices_per_node: 2 },
  },
  h200_4: run + (import 'models/qwen3_8b.libsonnet') + h200 + (import 'memory/keep_products_16k.libsonnet') + alone + {
    layout+:: { trainer_ranks: 2, engines: 2 },
    hardware+: { devices_per_node: 4 },
  },
  h200_8: run + (import 'models/qwen3_30b_a3b.libsonnet') + h200 + (import 'memory/keep_products_16k.libsonnet') + {
    layout+:: { trainer_ranks: 4, engines: 4 },
    // float32 weights and gradients take 61 GB a device, and optimizer state would take as much
    trainer+: { mesh+: { ep: 4 }, fsdp+: { reduce_gradients: 'micro_batch' }, memory+: { optimizer_offload: true } },
  },
  glm5_4: glm5 + { layout+:: { trainer_ranks: 2, engines: 1, devices_per_engine: 2 }, hardware+: { devices_per_node: 4 } },
  glm5_8: glm5 + { layout+:: { trainer_ranks: 4, engines: 1, devices_per_engine: 4 } },
};
local synchronous = { orchestrator+: { max_off_policy_steps: 0, max_batches_ahead: 0 } };
(import 'lib/named.libsonnet')(
  { ['asynchrony_' + shape]: shapes[shape] for shape in std.objectFields(shapes) } +
  { ['asynchrony_%s_synchronous' % shape]: shapes[shape] + synchronous for shape in std.objectFields(shapes) } +
  {
    asynchrony_h200_2_fp8: shapes.h200_2 { inference+: { quantization: 'fp8' } },
    asynchrony_h200_1_fp8: shapes.h200_1 { model+: { fp8: ['attention', 'feed_forward'] } },
  }
)
