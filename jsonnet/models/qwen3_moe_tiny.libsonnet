// Qwen3-MoE with 2.5 M parameters (1 M active), 2 of 8 experts for each token.
{
  model+: {
    family: 'qwen3_moe',
    init+: { std: 0.02 },
    tokenizer: { kind: 'characters', alphabet: import 'lib/alphabet.libsonnet' },
    hidden_size: 128,
    intermediate_size: 256,
    num_layers: 4,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 32,
    max_positions: 1024,
    rope_theta: 10000,
    rms_norm_eps: 1e-6,
    tie_embeddings: true,
    moe: {
      num_experts: 8,
      num_experts_per_token: 2,
      expert_intermediate_size: 192,
      normalize_top_k: true,
      num_dense_layers: 0,
      num_shared_experts: 0,
      score: 'softmax',
      routed_scale: 1.0,
    },
  },
}
