// Qwen3-30B-A3B's shape with random weights: 30.5 B parameters, 3.3 B active, 8 of 128 experts for each token.
{
  model+: {
    family: 'qwen3_moe',
    init+: { std: 0.02 },
    tokenizer: { kind: 'characters', alphabet: import 'lib/alphabet.libsonnet' },
    vocab_size: 151936,
    hidden_size: 2048,
    intermediate_size: 6144,
    num_layers: 48,
    num_heads: 32,
    num_kv_heads: 4,
    head_dim: 128,
    // As in Qwen3-30B-A3B-Instruct-2507. The first release has a base of 1e6 and 40,960 positions.
    max_positions: 262144,
    rope_theta: 10000000,
    rms_norm_eps: 1e-6,
    tie_embeddings: false,
    moe: {
      num_experts: 128,
      num_experts_per_token: 8,
      expert_intermediate_size: 768,
      normalize_top_k: true,
      num_dense_layers: 0,
      num_shared_experts: 0,
      score: 'softmax',
      routed_scale: 1.0,
    },
  },
}
