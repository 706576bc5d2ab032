// Qwen3-4B's shape with random weights: 4.0 B parameters, embeddings tied.
{
  model+: {
    family: 'qwen3',
    init+: { std: 0.02 },
    tokenizer: { kind: 'characters', alphabet: import 'lib/alphabet.libsonnet' },
    vocab_size: 151936,
    hidden_size: 2560,
    intermediate_size: 9728,
    num_layers: 36,
    num_heads: 32,
    num_kv_heads: 8,
    head_dim: 128,
    max_positions: 40960,
    rope_theta: 1000000,
    rms_norm_eps: 1e-6,
    tie_embeddings: true,
  },
}
