// Long sums with a calculator tool, in up to 16 turns of 8128 tokens with reasoning: the longest multi-turn task here.
{
  problems:: [
    {
      name: 'calculator',
      kind: 'calculator',
      args: { max_operand: 999999, num_operations: 24, operators: '+-', call_reward: 0.3, call_syntax: 'chat_format', split: 'train' },
      weight: 1,
      max_turns: 16,
    },
  ],
  context_tokens:: 131072,
  orchestrator+: { sampling+: { max_tokens_per_turn: 8128 }, rollout_timeout_s: 7200 },
}
