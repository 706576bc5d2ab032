{
  problems:: [
    {
      name: 'sums',
      kind: 'calculator',
      args: { max_operand: 9, num_operations: 1, operators: '+', call_reward: 0.3, call_syntax: 'chat_format', split: 'train' },
      weight: 1,
      max_turns: 3,
    },
  ],
  context_tokens:: 64,
  orchestrator+: { sampling+: { max_tokens_per_turn: 16 }, rollout_timeout_s: 60 },
}
