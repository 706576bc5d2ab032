// Your own run on one GPU: a short SFT on the answers in a file of problems, then RL.
// First: cp examples/problems/mine.jsonnet jsonnet/runs/
// Then change `model` and `data`. `orrery fetch model` and `orrery fetch dataset` print the lines to write here.
local model = import 'models/smollm2_135m.libsonnet';
local data = {
  source: { kind: 'source', path: 'examples/problems/arithmetic.jsonl', sha256: std.sha256(importstr 'examples/problems/arithmetic.jsonl'), split: null },
  held_out: { kind: 'fraction', fraction: 0.2 },
};
(import 'lib/named.libsonnet')({
  mine:
    (import 'lib/run.libsonnet') + model +
    (import 'hardware/one_h100.libsonnet') +
    (import 'algorithms/finetune.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      problems:: [
        {
          name: 'mine',
          kind: 'dataset',
          args: data + {
            split: 'train',
            where: {},
            system: null,
            prompt: '{question}',
            answer: '{answer}',
            answer_pattern: null,
            verdict: { kind: 'exact', ignore_case: false, pattern: '(-?[0-9]+)' },
          },
          weight: 1,
          max_turns: 1,
        },
      ],
      // Short answers need few tokens: `context_tokens` limits prompt and reply together, `max_tokens_per_turn` a reply.
      context_tokens:: 256,
      orchestrator+: {
        sampling+: { max_tokens_per_turn: 16 },
        rollout_timeout_s: 120,
        rollouts_per_batch: 256,
        admission: { kind: 'fixed', max_in_flight: 512 },
        evaluation+: { interval_steps: 10, num_problems: 128, rollouts_per_problem: 1 },
      },
      trainer+: {
        compile: false,
        memory+: { lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 8192 },
        checkpoint+: { interval_steps: 20 },
      },
      inference+: { enforce_eager: true, kv_cache_bytes: 4294967296 },
      transport+: { weights: 'nccl' },
      stages+: {
        // For a model that reasons before it answers, write `sft: null`, which skips SFT.
        sft+: {
          num_steps: 50,
          examples_per_batch: 64,
          optimizer+: { lr: 1e-4 },
          schedule: { kind: 'constant', warmup_steps: 5 },
          data+: { num_problems: 1793 },
        },
        rl+: { num_steps: 80 },
        evaluate+: { num_problems: 447 },
      },
    },
})
