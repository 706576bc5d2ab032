// Words in reverse order, with examples. The reward is the share of words in the right place. One turn.
{
  problems:: [
    {
      name: 'reverse_words',
      kind: 'few_shot',
      args: {
        kind: 'reverse_words',
        args: { min_words: 3, max_words: 3, instruction: '', split: 'train' },
        num_examples: 3,
        system: 'Write the words in reverse order.',
      },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 256,
  orchestrator+: { sampling+: { max_tokens_per_turn: 16 }, rollout_timeout_s: 120 },
}
