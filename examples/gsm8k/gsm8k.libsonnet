// GSM8K with GRPO and no SFT. `orrery fetch` writes the imported files of model and data.
// First: orrery fetch dataset openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee --config main
local data = import 'tasks/gsm8k_main_fetched.libsonnet';
(import 'lib/run.libsonnet') +
(import 'algorithms/finetune.libsonnet') +
(import 'memory/plain.libsonnet') + {
  seed: 1,
  problems:: [
    {
      name: 'gsm8k',
      kind: 'dataset',
      args: data + {
        split: 'train',
        where: {},
        system: 'Reason step by step, briefly. Write the final number as \\boxed{…}.',
        prompt: '{question}',
        answer: '{answer}',
        answer_pattern: '#### (.+)',
        verdict: { kind: 'math', boxed: true },
      },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 1536,
  trainer+: {
    optimizer+: { lr: 1e-6 },
    memory+: { lm_head_chunk_tokens: 'auto', max_tokens_per_micro_batch: 8192 },
    checkpoint+: { interval_steps: 50 },
  },
  orchestrator+: {
    rollouts_per_batch: 256,
    admission: { kind: 'fixed', max_in_flight: 256 },
    sampling+: { max_tokens_per_turn: 1024 },
    rollout_timeout_s: 600,
    evaluation+: { interval_steps: 20, num_problems: 128, rollouts_per_problem: 1 },
  },
  stages+: { sft: null, rl+: { num_steps: 200 }, evaluate+: { num_problems: 1319 } },
}
