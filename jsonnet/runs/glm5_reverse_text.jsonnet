// A GLM-5 with true attention widths and few layers, in FP8 on both sides of one H200. It writes words backwards after 128 other letters,
// so that a query chooses 128 of about 140 keys. The trainer replays the engine's choices of experts and keys, and trains the indexers:
// random indexers that stay frozen never choose some letters of the word, so the reward stays low.
local filler = std.join('', [std.char(65 + (7 * i + std.floor(i / 26)) % 26) for i in std.range(0, 127)]);
local run =
  (import 'lib/run.libsonnet') +
  (import 'models/glm5_tiny.libsonnet') +
  (import 'hardware/one_h200.libsonnet') +
  (import 'algorithms/grpo.libsonnet') +
  (import 'tasks/reverse_text.libsonnet') +
  (import 'memory/plain.libsonnet') + {
    local problem = super.problems[0],
    seed: 1,
    problems:: [problem { args+: { instruction: filler } }],
    context_tokens:: 256,
    model+: {
      hidden_size: 512,
      intermediate_size: 1024,
      rope_theta: 20,  // as in qwen3_tiny
      num_heads: 64,
      num_kv_heads: 64,
      head_dim: 256,
      fp8: ['attention', 'feed_forward', 'experts'],
      moe+: { num_experts: 16, num_experts_per_token: 4, expert_intermediate_size: 256 },
      mla: {
        q_lora_rank: 512,
        kv_lora_rank: 512,
        nope_head_dim: 192,
        rope_head_dim: 64,
        value_head_dim: 256,
        indexer: { num_heads: 32, head_dim: 128, top_k: 128, types: ['full', 'shared', 'full', 'full'] },
      },
    },
    trainer+: {
      compile: false,  // compiling takes longer than these steps
      indexer: 'train',
      indexer_choice: 'replay',
      fsdp+: { reduce_gradients: 'micro_batch' },
      optimizer+: { lr: 2e-4 },
      memory+: { max_tokens_per_micro_batch: 16384 },
      checkpoint+: { interval_steps: 100 },
    },
    inference+: { enforce_eager: true, kv_cache_bytes: 4294967296 },
    transport+: { routed_experts: true },
    orchestrator+: {
      rollouts_per_batch: 256,
      evaluation+: { interval_steps: 10, num_problems: 128, rollouts_per_problem: 1, stop_at: 0.95 },
    },
    stages+: {
      sft+: {
        num_steps: 92,
        examples_per_batch: 64,
        optimizer+: { lr: 5e-4 },
        schedule: { kind: 'constant', warmup_steps: 10 },
        data+: { num_problems: 8192 },
      },
      rl+: { num_steps: 300 },
      evaluate+: { num_problems: 256 },
    },
  };
// Few steps, to compare the first steps' mismatch.
local short = run { orchestrator+: { evaluation+: { num_problems: 32 } }, stages+: { rl+: { num_steps: 8 }, evaluate+: { num_problems: 32 } } };
(import 'lib/named.libsonnet')(
  { ['glm5_reverse_text_seed_%d' % seed]: run { seed: seed } for seed in std.range(1, 3) } +
  {
    // the trainer attends to its own choice
    glm5_reverse_text_compare: short { trainer+: { indexer_choice: 'compare' } },
    // no context is longer than top_k, so attention is dense on both sides
    glm5_reverse_text_dense: short {
      model+: { mla+: { indexer+: { top_k: 256 } } },
      trainer+: { indexer: 'frozen', indexer_choice: 'own' },
    },
  }
)
