// Two turns on one engine whose cache on the device holds a few rollouts: by its second turn a rollout's first one is in host memory or on disk.
(import 'lib/named.libsonnet')({
  calculator_kv_tiers: (import 'runs/calculator.jsonnet').calculator {
    // thirty-one characters: a question of more than one block, because partial blocks are not moved
    problems:: [problem { args+: { max_operand: 9, num_operations: 15 }, max_turns: 2 } for problem in super.problems],
    trainer+: { checkpoint+: { interval_steps: 4 } },
    inference+: { kv_cache_bytes: 2097152, kv_offload: { kind: 'tiers', host_bytes: 1048576, disk_bytes: 268435456 } },
    orchestrator+: {
      // a call repeats the question
      sampling+: { max_tokens_per_turn: 48 },
      evaluation+: { interval_steps: 8, num_problems: 16 },
    },
    stages+: {
      sft+: { data+: { num_problems: 1120 } },
      rl+: { num_steps: 8 },
      evaluate+: { num_problems: 16 },
    },
  },
})
