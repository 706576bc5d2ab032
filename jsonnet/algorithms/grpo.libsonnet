// GRPO without the standard deviation (Dr. GRPO), trained with DPPO's binary-TV mask, up to two versions off policy.
{
  trainer+: {
    optimizer+: { kind: 'adamw', lr: 3e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 },
    schedule: { kind: 'constant', warmup_steps: 3 },
    max_grad_norm: 1.0,
    loss: { kind: 'dppo', mask_low: 0.2, mask_high: 0.2, penalty: 1e-3 },
  },
  orchestrator+: {
    algorithm+: { kind: 'grpo', group_size: 8, normalize_std: false },
    drop_zero_advantage_groups: true,
    max_sampled_ratio: 3.0,
    max_off_policy_steps: 2,
    max_batches_ahead: std.min(1, self.max_off_policy_steps),
    sampling+: { temperature: 1.0 },
    on_timeout: 'zero',
  },
}
