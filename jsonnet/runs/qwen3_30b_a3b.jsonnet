// Qwen3-30B-A3B on two nodes: eight devices train, eight serve. One run for each measured length of context.
local whole =
  (import 'lib/run.libsonnet') +
  (import 'models/qwen3_30b_a3b.libsonnet') +
  (import 'hardware/h200_node.libsonnet') +
  (import 'algorithms/grpo.libsonnet') +
  (import 'tasks/countdown.libsonnet') + {
    seed: 1,
    trainer+: {
      // whole float32 gradients are 122 GB, too much for one device
      fsdp+: { reduce_gradients: 'micro_batch' },
      optimizer+: { lr: 1e-6 },
      checkpoint+: { interval_steps: 50 },
    },
    orchestrator+: {
      rollouts_per_batch: 256,
      // a question takes a thousand tokens of a context
      sampling+: { max_tokens_per_turn: $.context_tokens - 1024 },
      evaluation+: { interval_steps: 20, num_problems: 64, rollouts_per_problem: 1 },
    },
    transport+: { weights: 'nccl' },
    stages+: { rl+: { num_steps: 500 }, evaluate+: { num_problems: 256 } },
  };
local run = whole + { stages+: { sft: null } };
local lora = { trainer+: { lora: { rank: 16, alpha: 32.0, targets: ['attention', 'experts'], seed: 1 }, optimizer+: { lr: 1e-5 } } };

(import 'lib/named.libsonnet')({
  qwen3_30b_a3b_16k: run + (import 'memory/keep_products_16k.libsonnet') + { context_tokens:: 16384 },
  qwen3_30b_a3b_32k: run + (import 'memory/keep_products_32k.libsonnet') + { context_tokens:: 32768 },
  qwen3_30b_a3b_64k: run + (import 'memory/keep_attention_64k.libsonnet') + { context_tokens:: 65536 },
  // pairs of devices share a sequence, 65536 tokens each
  qwen3_30b_a3b_131k: run + (import 'memory/keep_attention_64k.libsonnet') + {
    context_tokens:: 131072,
    trainer+: { mesh+: { cp: 2 }, memory+: { max_tokens_per_micro_batch: 131072 } },
  },
  // one more node: eight engines prefill, eight decode
  qwen3_30b_a3b_16k_prefill_decode: self.qwen3_30b_a3b_16k {
    hardware+: { num_nodes: 3 },
    layout+:: { engines: 16, prefill_engines: 8 },
    inference+: { router: { kind: 'none' } },
  },
  // the trainer replays the engines' experts
  qwen3_30b_a3b_16k_replay: self.qwen3_30b_a3b_16k { transport+: { routed_experts: true } },
  // SFT on two nodes, of examples of 4,000 to 16,000 tokens; RL then takes a third node
  qwen3_30b_a3b_16k_sft: whole + (import 'tasks/reverse_text.libsonnet') + (import 'memory/keep_products_16k.libsonnet') + {
    context_tokens:: 16384,
    problems:: [problem { args+: { min_length: 2000, max_length: 8000 } } for problem in super.problems],
    layout+:: { trainer_ranks: 16 },
    hardware+: { num_nodes: 3 },
    orchestrator+: { rollout_timeout_s: 900 },
    stages+: { sft+: { num_steps: 500, examples_per_batch: 64, data+: { num_problems: 32000 } } },
  },
  // caches move to the node's memory (1 TiB for eight engines), then to its scratch disk (2 TiB)
  qwen3_30b_a3b_16k_kv_tiers: self.qwen3_30b_a3b_16k {
    inference+: { kv_offload: { kind: 'tiers', host_bytes: 137438953472, disk_bytes: 274877906944 } },
  },
  // eight engines in FP8
  qwen3_30b_a3b_16k_fp8: self.qwen3_30b_a3b_16k { inference+: { quantization: 'fp8' } },
  // two engines of four devices each: data parallel attention, whole experts over all four
  qwen3_30b_a3b_16k_wide: self.qwen3_30b_a3b_16k {
    layout+:: { engines: 2, devices_per_engine: 4 },
    inference+: { data_parallel: 4 },
  },
  qwen3_30b_a3b_16k_offload: self.qwen3_30b_a3b_16k { trainer+: { memory+: { optimizer_offload: true } } },
  // the least device memory for full fine-tuning on eight devices
  qwen3_30b_a3b_16k_kitchen_sink: run + (import 'memory/kitchen_sink.libsonnet') + { context_tokens:: 16384 },
  // with adapters only, there is memory to keep the logits
  qwen3_30b_a3b_lora_16k: self.qwen3_30b_a3b_16k + lora + { trainer+: { memory+: { lm_head_keeps_logits: true } } },
  qwen3_30b_a3b_lora_64k: self.qwen3_30b_a3b_64k + lora,
})
