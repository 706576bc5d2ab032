{
  model+: {
    family: 'qwen3',
    init+: { std: 0.02 },
    tokenizer: { kind: 'characters', alphabet: import 'lib/alphabet.libsonnet' },
    hidden_size: 16,
    intermediate_size: 32,
    num_layers: 1,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 8,
    max_positions: 256,
    rope_theta: 100,
    rms_norm_eps: 1e-6,
    tie_embeddings: true,
  },
}
