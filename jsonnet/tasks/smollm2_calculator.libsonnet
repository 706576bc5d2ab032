// A sum that a calculator tool can do, for a chat format without tools: the call is text, which examples show. Several turns.
{
  problems:: [
    {
      name: 'calculator',
      kind: 'few_shot',
      args: {
        kind: 'calculator',
        args: { max_operand: 99, num_operations: 1, operators: '+-', call_reward: 0.3, call_syntax: 'text', split: 'train' },
        num_examples: 1,
        system: 'Work out each sum with calculator(sum), then say its result.',
      },
      weight: 1,
      max_turns: 2,
    },
  ],
  context_tokens:: 256,
  orchestrator+: { sampling+: { max_tokens_per_turn: 16 }, rollout_timeout_s: 120 },
}
