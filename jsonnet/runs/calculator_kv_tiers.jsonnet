// Two turns on one engine with a small cache: before its second turn, a rollout's cache has moved to host memory or disk.
(import 'lib/named.libsonnet')({
  calculator_kv_tiers: (import 'runs/calculator.jsonnet').calculator {
    // 31 characters, so that a question fills more than one block: partial blocks are not moved
    problems:: [problem { args+: { max_operand: 9, num_operations: 15 }, max_turns: 2 } for problem in super.problems],
    trainer+: { checkpoint+: { interval_steps: 4 } },
    inference+: { kv_cache_bytes: 2097152, kv_offload: { kind: 'tiers', host_bytes: 4194304, disk_bytes: 268435456 } },
    orchestrator+: {
      // a call contains the question again
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
