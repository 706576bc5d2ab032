// The family `spell_backward` of reasoning-gym, with short words.
{
  problems:: [
    {
      name: 'spell_backward',
      kind: 'reasoning_gym',
      args: { family: 'spell_backward', config: { min_word_len: 3, max_word_len: 6 }, split: 'train' },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 128,
  orchestrator+: { sampling+: { max_tokens_per_turn: 16 }, rollout_timeout_s: 60 },
}
