// A pretrained model of 135 M parameters learns from a file of problems: a short SFT on the file's answers, then RL. Three seeds.
// Engine and trainer share one GPU and compute in bfloat16. `smollm2_problems_smoke` is the same on two CPU cores.
local model = import 'models/smollm2_135m.libsonnet';
local task = import 'tasks/problem_file.libsonnet';
local run =
  (import 'lib/run.libsonnet') + model + task +
  (import 'algorithms/finetune.libsonnet') +
  (import 'memory/plain.libsonnet') + {
    // Short runs: compiling and capturing graphs would take longer than they save.
    trainer+: { compile: false, memory+: { lm_head_chunk_tokens: 'auto' } },
    inference+: { enforce_eager: true },
    stages+: { sft+: { optimizer+: { lr: 1e-4 }, data+: { num_problems: 1793 } } },
  };
local gpu = run + (import 'hardware/one_h100.libsonnet') + {
  // One micro-batch holds all 256 short rollouts. Two would take twice its time, because kernel launches dominate.
  trainer+: {
    memory+: { max_tokens_per_micro_batch: 16384, lm_head_chunk_tokens: 4096 },
    fsdp+: { reshard_after_forward: false },
    checkpoint+: { interval_steps: 20 },
  },
  inference+: { kv_cache_bytes: 4294967296 },
  orchestrator+: {
    rollouts_per_batch: 256,
    admission: { kind: 'fixed', max_in_flight: 512 },
    evaluation+: { interval_steps: 10, num_problems: 128, rollouts_per_problem: 1 },
  },
  transport+: { weights: 'nccl' },
  stages+: { sft+: { num_steps: 50, examples_per_batch: 64, schedule: { kind: 'constant', warmup_steps: 5 } }, rl+: { num_steps: 80 }, evaluate+: { num_problems: 447 } },
};
local smoke = run + (import 'hardware/cpu.libsonnet') + {
  trainer+: { memory+: { max_tokens_per_micro_batch: 1024, lm_head_chunk_tokens: 256 }, checkpoint+: { interval_steps: 2 } },
  orchestrator+: {
    algorithm+: { group_size: 4 },
    rollouts_per_batch: 16,
    admission: { kind: 'fixed', max_in_flight: 16 },
    rollout_timeout_s: 600,
    evaluation+: { interval_steps: 2, num_problems: 8, rollouts_per_problem: 1 },
  },
  stages+: { sft+: { num_steps: 2, examples_per_batch: 8 }, rl+: { num_steps: 2 }, evaluate+: { num_problems: 8 } },
};
(import 'lib/named.libsonnet')(
  { ['smollm2_problems_seed_%d' % seed]: gpu { seed: seed } for seed in std.range(1, 3) } +
  {
    // TRL trains groups without signal too. benchmarks/async/peer_trl.py compares this run with TRL.
    smollm2_problems_all_groups: gpu { seed: 1, orchestrator+: { drop_zero_advantage_groups: false } },
    smollm2_problems_smoke: smoke { seed: 1 },
  }
)
