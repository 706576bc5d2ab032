// Sums with a calculator tool, for a chat format without tools: calls are text, as in the examples. Several turns.
{
  problems:: [
    {
      name: 'calculator',
      kind: 'few_shot',
      args: {
        kind: 'calculator',
        args: { max_operand: 99, num_operations: 3, operators: '+-', call_reward: 0.1, call_syntax: 'text', split: 'train' },
        num_examples: 2,
        system: 'Work out the sum with the calculator, then say its result.',
      },
      weight: 1,
      max_turns: 2,
    },
  ],
  context_tokens:: 256,
  orchestrator+: { sampling+: { max_tokens_per_turn: 32 }, rollout_timeout_s: 120 },
}
