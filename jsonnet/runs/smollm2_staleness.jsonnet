// One task at several bounds of staleness, with as many batches ahead as each bound allows. Bound 0 is synchronous.
// Weights go from device to device, so that the wire does not hide the bound. Both roles fit one device: CUDA_VISIBLE_DEVICES=0,0.
local reverse_words = (import 'runs/smollm2.jsonnet').smollm2_reverse_words_seed_1;
(import 'lib/named.libsonnet')({
  ['smollm2_staleness_%d' % bound]: reverse_words {
    transport+: { weights: 'nccl' },
    stages+: { rl+: { num_steps: 25 } },  // most runs have learned the task by then
    orchestrator+: { max_off_policy_steps: bound, max_batches_ahead: std.max(0, bound - 1) },
  }
  for bound in [0, 1, 2, 4, 8]
})
