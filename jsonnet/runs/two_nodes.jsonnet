// Two Slurm nodes of four H200 each on one host (benchmarks/cluster/two_nodes.py), with four of 48 layers. One node is lost. The twins
// with `pair` have one H200 a node. The twins with `cpu` have a tiny mixture and nodes without GPUs.
local checkpoints = { trainer+: { checkpoint+: { interval_steps: 2 } } };
local four = checkpoints + {
  model+: { num_layers: 4 },
  layout+:: { engines: 4 },
  hardware+: { devices_per_node: 4 },
  // each start would compile and capture graphs anew
  trainer+: { compile: false },
  inference+: { enforce_eager: true },
};
local replay = {
  orchestrator+: { drop_zero_advantage_groups: false },
  stages+: { sft: null, rl+: { num_steps: 10 }, evaluate+: { num_problems: 8 } },
};
local sft = { stages+: { sft+: { num_steps: 12, examples_per_batch: 16, data+: { num_problems: 512 } } } };
local store = replay {
  layout+:: { trainer_ranks: 4, engines: 2, devices_per_engine: 4 },
  hardware+: { num_nodes: 3 },
  inference+: { kv_offload: { kind: 'mooncake', protocol: 'tcp', segment_bytes: 17179869184 } },
};
// A checkpoint takes 37 GB, and a host of two GPUs has a small, slow disk.
local pair = {
  hardware+: { devices_per_node: 1 },
  layout+:: { engines: 1 },
  trainer+: { checkpoint+: { interval_steps: 3, keep: 1 } },
};
local large = import 'runs/qwen3_30b_a3b.jsonnet';
local cpu = (import 'runs/reverse_text_moe.jsonnet').reverse_text_moe + checkpoints + {
  hardware+: { num_nodes: 2, devices_per_node: 1 },
  orchestrator+: { rollouts_per_batch: 64, evaluation+: { interval_steps: 10, num_problems: 8 } },
};
local large_replay = large.qwen3_30b_a3b_16k_replay + four + (import 'tasks/lengths.libsonnet') + replay + {
  layout+:: { trainer_ranks: 4 },
  answer_tokens:: { median: 256, max: 4032 },
  context_tokens:: 16384,
  orchestrator+: { evaluation+: { interval_steps: 10, num_problems: 8 } },
};
local large_sft = large.qwen3_30b_a3b_16k_sft + four + sft + { layout+:: { trainer_ranks: 8 } };
(import 'lib/named.libsonnet')({
  two_nodes_replay: large_replay,
  two_nodes_replay_pair: large_replay + pair + {
    layout+:: { trainer_ranks: 1 },
    orchestrator+: { rollouts_per_batch: 64 },
  },
  two_nodes_sft: large_sft,
  two_nodes_sft_pair: large_sft + pair + {
    layout+:: { trainer_ranks: 2 },
    stages+: { sft+: { num_steps: 10, examples_per_batch: 4 } },
  },
  two_nodes_replay_cpu: cpu + replay + { transport+: { routed_experts: true, weights: 'nccl' } },
  // only the engines and the store of this run start (benchmarks/inference/store.py)
  two_nodes_store: large.qwen3_30b_a3b_16k + four + store,
  two_nodes_store_cpu: cpu + store + {
    layout+:: { trainer_ranks: 1, devices_per_engine: 1 },
    inference+: { kv_offload+: { segment_bytes: 134217728 }, max_model_len_tokens: 512 },
  },
  two_nodes_sft_cpu: cpu + sft + {
    layout+:: { trainer_ranks: 2 },
    hardware+: { num_nodes: 3 },
  },
})
