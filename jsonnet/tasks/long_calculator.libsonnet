// Long sums with a calculator tool, in up to 16 turns of 8128 tokens with reasoning: the longest multi-turn task here.
(import 'tasks/calculator.libsonnet') + {
  problems:: [problem { args+: { max_operand: 999999, num_operations: 24 }, max_turns: 16 } for problem in super.problems],
  context_tokens:: 131072,
  orchestrator+: { sampling+: { max_tokens_per_turn: 8128 }, rollout_timeout_s: 7200 },
}
