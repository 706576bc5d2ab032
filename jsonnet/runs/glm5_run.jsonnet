// GLM-5 with a context of 131072 tokens on 28 nodes: 12 train in bfloat16, 16 serve in FP8 with one engine per node.
(import 'lib/named.libsonnet')({
  glm5_run:
    (import 'lib/run.libsonnet') +
    (import 'models/glm5.libsonnet') +
    (import 'hardware/h200.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/countdown.libsonnet') +
    (import 'memory/long_context.libsonnet') + {
      seed: 1,
      layout+:: { prefill_engines: 0 },
      trainer+: {
        mesh+: { ep: 8 },
        // 'step' would keep 400 GB of unsharded gradients on each GPU
        fsdp+: { reduce_gradients: 'micro_batch' },
        optimizer+: { lr: 1e-6 },
        checkpoint+: { interval_steps: 50 },
      },
      // Tensor-parallel ranks would all cache the same latent keys. Data-parallel ranks cache different sequences.
      inference+: {
        quantization: 'fp8',
        data_parallel: 4,
        kv_cache_bytes: 34359738368,
        max_num_sequences: 64,
        max_restarts: 16,
      },
      orchestrator+: {
        algorithm+: { group_size: 16 },
        admission+: { max_in_flight: 1024 },
        rollouts_per_batch: 256,
        max_off_policy_steps: 8,
        evaluation+: { interval_steps: 20, num_problems: 64, rollouts_per_problem: 1 },
      },
      // routed_experts: the trainer uses the experts that the engines chose for each token
      transport+: { weights: 'nccl', routed_experts: true },
      stages+: {
        sft: null,
        rl+: { num_steps: 1000 },
        evaluate+: { num_problems: 256 },
      },
    },
})
