// GLM-5 with a context of 131072 tokens on 28 nodes: 12 train in bfloat16, 16 serve in FP8. Four engines of two nodes prefill,
// one engine of eight nodes decodes.
(import 'lib/named.libsonnet')({
  glm5_run:
    (import 'lib/run.libsonnet') +
    (import 'models/glm5.libsonnet') +
    (import 'hardware/h200.libsonnet') +
    (import 'algorithms/grpo.libsonnet') +
    (import 'tasks/long_calculator.libsonnet') +
    (import 'memory/long_context.libsonnet') + {
      local run = self,
      seed: 1,
      layout+:: { engines: 5, prefill_engines: 4 },
      hardware+: { num_nodes: run.layout.trainer_ranks / 8 + 16 },
      trainer+: {
        mesh+: { ep: 8 },
        // 'step' would keep 400 GB of unsharded gradients on each GPU
        fsdp+: { reduce_gradients: 'micro_batch' },
        optimizer+: { lr: 1e-6 },
        // counts the keys that engine and trainer choose differently
        indexer_choice: 'compare',
        checkpoint+: { interval_steps: 50 },
      },
      // Tensor-parallel ranks would all cache the same latent keys. Data-parallel ranks cache different sequences.
      inference+: {
        quantization: 'fp8',
        nodes_per_replica: 8,
        data_parallel: 64,
        tensor_parallel: 1,
        // 'deepep_low_latency' would halve a decode step, but the images hold no DeepEP (containers/README.md)
        all2all_backend: 'allgather_reducescatter',
        // a prompt fills a step of a prefill engine, so graphs gain it nothing
        prefill: self.shape {
          nodes_per_replica: 2,
          data_parallel: 8,
          tensor_parallel: 2,
          kv_cache_bytes: 51539607552,
          max_num_sequences: 16,
          max_batched_tokens: 16384,
          enforce_eager: true,
        },
        kv_cache_bytes: 85899345920,
        max_num_sequences: 64,
        max_restarts: 16,
      },
      orchestrator+: {
        algorithm+: { group_size: 16 },
        admission+: { max_in_flight: 2048 },
        rollouts_per_batch: 256,
        // the longest rollout starts 29 versions before its batch
        max_off_policy_steps: 30,
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
