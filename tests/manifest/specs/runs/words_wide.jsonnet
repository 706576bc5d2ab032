// Two engines behind a router, two trainer ranks.
(import 'lib/named.libsonnet')({
  words_wide:
    (import 'runs/words.jsonnet').words {
      layout+:: { trainer_ranks: 2, engines: 2 },
      trainer+: { checkpoint+: { interval_steps: 3 } },
      orchestrator+: { rollouts_per_batch: 12, admission+: { max_in_flight: 8 } },
    },
})
