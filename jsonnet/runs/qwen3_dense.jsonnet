// Qwen3's dense models: 8B and 4B on two nodes (one trains), 0.6B on two devices of one node.
local run =
  (import 'lib/run.libsonnet') +
  (import 'algorithms/grpo.libsonnet') +
  (import 'tasks/countdown.libsonnet') +
  (import 'memory/keep_all_16k.libsonnet') + {
    seed: 1,
    trainer+: { optimizer+: { lr: 1e-6 }, checkpoint+: { interval_steps: 50 } },
    orchestrator+: {
      rollouts_per_batch: 256,
      // a question takes a thousand tokens of a context
      sampling+: { max_tokens_per_turn: $.context_tokens - 1024 },
      evaluation+: { interval_steps: 20, num_problems: 64, rollouts_per_problem: 1 },
    },
    transport+: { weights: 'nccl' },
    stages+: { sft: null, rl+: { num_steps: 500 }, evaluate+: { num_problems: 256 } },
  };

(import 'lib/named.libsonnet')({
  // two sequences a micro-batch
  qwen3_8b_8k: run + (import 'models/qwen3_8b.libsonnet') + (import 'hardware/h200_node.libsonnet') + { context_tokens:: 8192 },
  qwen3_4b_16k: run + (import 'models/qwen3_4b.libsonnet') + (import 'hardware/h200_node.libsonnet') + { context_tokens:: 16384 },
  qwen3_0_6b_16k: run + (import 'models/qwen3_0_6b.libsonnet') + (import 'hardware/h200_pair.libsonnet') + { context_tokens:: 16384 },
})
