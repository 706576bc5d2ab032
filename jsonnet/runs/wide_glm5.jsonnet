// Engines of several ranks on eight H200 that also train: GLM-5's widths and attention in FP8, with 5 of 78 layers and 48 of 256 experts, as
// experts must divide over 2, 6 and 8 ranks. The trainer replays the engines' choices of experts and keys. `wide_cpu` is a tiny mixture.
local slice =
  (import 'runs/asynchrony.jsonnet').asynchrony_glm5_8 + {
    model+: (import 'models/glm5.libsonnet').model + {
      init: { kind: 'random', seed: $.seed, std: 0.02 },
      tokenizer: { kind: 'characters', alphabet: import 'lib/alphabet.libsonnet' },
      num_layers: 5,
      num_mtp_layers: 0,
      fp8: ['attention', 'feed_forward', 'experts'],
      moe+: { num_experts: 48 },
    },
    layout+:: { trainer_ranks: 8, engines: 1, devices_per_engine: 8 },
    hardware+: { shared_devices: true },
    inference+: { kv_cache_bytes: 8589934592, max_num_sequences: 128 },
    stages+: { rl+: { num_steps: 8 } },
  };
// an engine of two ranks prefills, one of six ranks decodes
local apart = slice {
  layout+:: { engines: 2, prefill_engines: 1, devices_per_engine: 6 },
  inference+: { prefill: self.shape { data_parallel: 2 } },
};
(import 'lib/named.libsonnet')({
  wide_glm5_8: slice,
  wide_glm5_2_6: apart,
  wide_glm5_2_6_deepep: apart {
    inference+: {
      all2all_backend: 'deepep_low_latency',
      prefill+: { all2all_backend: 'deepep_high_throughput' },
    },
  },
  wide_cpu: (import 'runs/reverse_text_moe.jsonnet').reverse_text_moe {
    layout+:: { engines: 2, prefill_engines: 1, devices_per_engine: 2 },
    hardware+: { devices_per_node: 4 },
    inference+: { data_parallel: 2, prefill: self.shape { data_parallel: 1, expert_parallel: false } },
    transport+: { routed_experts: true },
    orchestrator+: { drop_zero_advantage_groups: false, evaluation+: { interval_steps: 8, num_problems: 8 } },
    stages+: { sft: null, rl+: { num_steps: 8 } },
  },
})
