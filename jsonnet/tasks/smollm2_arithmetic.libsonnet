// Sums and differences of two or three digits, from reasoning-gym's `chain_sum`, with examples. One turn.
{
  problems:: [
    {
      name: 'chain_sum',
      kind: 'few_shot',
      args: {
        kind: 'reasoning_gym',
        args: { family: 'chain_sum', config: { min_terms: 2, max_terms: 3, min_digits: 1, max_digits: 1 }, split: 'train' },
        num_examples: 4,
        system: null,
      },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 256,
  orchestrator+: { sampling+: { max_tokens_per_turn: 16 }, rollout_timeout_s: 120 },
}
