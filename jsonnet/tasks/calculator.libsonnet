// Sums with a calculator tool: call it, read its answer, reply. Several turns.
{
  problems:: [
    {
      name: 'calculator',
      kind: 'calculator',
      args: { max_operand: 20, num_operations: 1, operators: '+-', call_reward: 0.3, call_syntax: 'chat_format', split: 'train' },
      weight: 1,
      max_turns: 3,
    },
  ],
  context_tokens:: 128,
  orchestrator+: { sampling+: { max_tokens_per_turn: 32 }, rollout_timeout_s: 120 },
}
