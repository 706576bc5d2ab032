{
  trainer+: {
    optimizer+: { kind: 'adamw', lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 },
    schedule: { kind: 'constant', warmup_steps: 0 },
    max_grad_norm: 1.0,
    loss: { kind: 'dppo', mask_low: 0.2, mask_high: 0.2, penalty: 1e-3 },
  },
  orchestrator+: {
    algorithm+: { kind: 'grpo', group_size: 4, normalize_std: false },
    drop_zero_advantage_groups: true,
    max_sampled_ratio: 3.0,
    on_timeout: 'zero',
    max_off_policy_steps: 1,
    max_batches_ahead: 0,
    keep_batches: 20,
    sampling+: { temperature: 1.0 },
  },
}
