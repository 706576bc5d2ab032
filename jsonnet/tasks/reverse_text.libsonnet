// Write a word backwards. The reward is the share of characters in the right place. One turn.
{
  problems:: [
    {
      name: 'reverse_text',
      kind: 'reverse_text',
      args: { alphabet: 'abcdefghijkl', min_length: 4, max_length: 4, instruction: 'reverse ', split: 'train' },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 128,
  orchestrator+: { sampling+: { max_tokens_per_turn: 8 }, rollout_timeout_s: 60 },
}
