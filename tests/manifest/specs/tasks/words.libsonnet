{
  problems:: [
    {
      name: 'words',
      kind: 'reverse_text',
      args: { alphabet: 'abcd', min_length: 2, max_length: 3, instruction: 'reverse ', split: 'train' },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 64,
  orchestrator+: { sampling+: { max_tokens_per_turn: 8 }, rollout_timeout_s: 60 },
}
