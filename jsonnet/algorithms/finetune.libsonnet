// GRPO on a pretrained policy: every weight moves, slowly.
(import 'algorithms/grpo.libsonnet') + {
  trainer+: { optimizer+: { lr: 1e-5 }, schedule: { kind: 'constant', warmup_steps: 5 } },
}
