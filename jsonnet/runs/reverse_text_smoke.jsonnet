// The demo, smaller, with two engines behind a router, two trainer ranks and a few steps. The end-to-end tests run it.
(import 'lib/named.libsonnet')({
  reverse_text_smoke:
    (import 'runs/reverse_text.jsonnet').reverse_text {
      layout+:: { trainer_ranks: 2, engines: 2 },
      trainer+: { checkpoint+: { interval_steps: 4 } },
      orchestrator+: {
        admission: { kind: 'adaptive', min_in_flight: 32, max_in_flight: 128 },
        evaluation+: { interval_steps: 8, num_problems: 64 },
      },
      stages+: {
        sft+: { data+: { num_problems: 1024 } },
        rl+: { num_steps: 24 },
        evaluate+: { num_problems: 128 },
      },
    },
})
