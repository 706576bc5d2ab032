// One task at several bounds of staleness, with as many batches ahead as each bound allows; bound 0 is synchronous.
// Bound 2 is smollm2_reverse_words_seed_1.
local reverse_words = (import 'runs/smollm2.jsonnet').smollm2_reverse_words_seed_1;
(import 'lib/named.libsonnet')({
  ['smollm2_staleness_%d' % bound]: reverse_words {
    orchestrator+: { max_off_policy_steps: bound, max_batches_ahead: std.max(0, bound - 1) },
  }
  for bound in [0, 1, 4, 8]
})
