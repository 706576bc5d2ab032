// GSM8K with Qwen3-0.6B on one GPU: with adapters for 24 GB, with all weights for 48 GB.
// First: orrery fetch model Qwen/Qwen3-0.6B@c1899de289a04d12100db370d81485cdf75e47ca
// Then: cp examples/gsm8k/gsm8k_qwen3_0_6b.jsonnet jsonnet/runs/
local run =
  (import 'examples/gsm8k/gsm8k.libsonnet') +
  (import 'models/qwen3_0_6b_pretrained.libsonnet') +
  (import 'hardware/one_h100.libsonnet') +
  (import 'examples/gsm8k/no_thinking.libsonnet');
(import 'lib/named.libsonnet')({
  gsm8k_qwen3_0_6b: run { inference+: { kv_cache_bytes: 8589934592 } },
  gsm8k_qwen3_0_6b_lora: run {
    trainer+: {
      lora: { rank: 16, alpha: 32.0, targets: ['attention', 'feed_forward'], seed: 1 },
      optimizer+: { lr: 1e-5 },
      memory+: { activation_checkpointing: { kind: 'full' }, max_tokens_per_micro_batch: 4096 },
    },
    inference+: { kv_cache_bytes: 4294967296 },
  },
})
