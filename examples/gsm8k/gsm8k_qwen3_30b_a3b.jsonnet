// GSM8K with Qwen3-30B-A3B on eight GPUs of 141 GB: four train, four serve.
// First: orrery fetch model Qwen/Qwen3-30B-A3B
// Then: cp examples/gsm8k/gsm8k_qwen3_30b_a3b.jsonnet jsonnet/runs/
(import 'lib/named.libsonnet')({
  gsm8k_qwen3_30b_a3b:
    (import 'examples/gsm8k/gsm8k.libsonnet') +
    (import 'models/qwen3_30b_a3b_pretrained.libsonnet') +
    (import 'hardware/h200_pair.libsonnet') +
    (import 'examples/gsm8k/no_thinking.libsonnet') + {
      layout:: { trainer_ranks: 4, engines: 4, prefill_engines: 0, devices_per_engine: 1 },
      trainer+: {
        mesh+: { ep: 4 },
        fsdp+: { reduce_gradients: 'micro_batch' },
        memory+: { activation_checkpointing: { kind: 'full' }, optimizer_offload: true },
      },
      transport+: { weights: 'nccl' },
    },
})
