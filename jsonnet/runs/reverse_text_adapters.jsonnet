// The demo, smaller, with adapters: engines receive adapters only, and serve them beside their first weights.
(import 'lib/named.libsonnet')({
  reverse_text_adapters:
    (import 'runs/reverse_text_smoke.jsonnet').reverse_text_smoke {
      trainer+: {
        lora: { rank: 32, alpha: 64.0, targets: ['attention', 'feed_forward'], seed: 1 },
        optimizer+: { lr: 1e-3 },
      },
      inference+: { max_restarts: 1 },
      transport+: { weights: 'adapters' },
      stages+: {
        sft+: { num_steps: 60, optimizer+: { lr: 5e-3 } },
        rl+: { num_steps: 24 },
        evaluate+: { num_problems: 64 },
      },
    },
})
