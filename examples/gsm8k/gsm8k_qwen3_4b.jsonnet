// GSM8K with Qwen3-4B on one GPU of 80 GB with adapters.
// First: orrery fetch model Qwen/Qwen3-4B
// Then: cp examples/gsm8k/gsm8k_qwen3_4b.jsonnet jsonnet/runs/
(import 'lib/named.libsonnet')({
  gsm8k_qwen3_4b:
    (import 'examples/gsm8k/gsm8k.libsonnet') +
    (import 'models/qwen3_4b_pretrained.libsonnet') +
    (import 'hardware/one_h100.libsonnet') +
    (import 'examples/gsm8k/no_thinking.libsonnet') + {
      // Adapters, because 16 bytes for each of 4 B parameters would leave the engine no memory.
      trainer+: {
        lora: { rank: 32, alpha: 64.0, targets: ['attention', 'feed_forward'], seed: 1 },
        optimizer+: { lr: 1e-5 },
        memory+: { activation_checkpointing: { kind: 'full' } },
      },
      inference+: { kv_cache_bytes: 12884901888 },
    },
})
