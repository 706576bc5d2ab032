// GRPO on a pretrained policy, with a low learning rate for all weights.
(import 'algorithms/grpo.libsonnet') + {
  trainer+: { optimizer+: { lr: 1e-5 }, schedule: { kind: 'constant', warmup_steps: 5 } },
}
