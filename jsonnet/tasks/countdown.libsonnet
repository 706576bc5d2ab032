// Reach a number with given numbers and four operations: a puzzle of reasoning-gym that needs long reasoning.
{
  problems:: [
    {
      name: 'countdown',
      kind: 'reasoning_gym',
      args: { family: 'countdown', config: { min_numbers: 4, max_numbers: 6 }, split: 'train' },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 131072,
  orchestrator+: { sampling+: { max_tokens_per_turn: 130048 }, rollout_timeout_s: 7200 },
}
