// Llama-3.1-8B's shape with random weights: 8.0 B parameters.
{
  model+: {
    family: 'llama',
    init+: { std: 0.02 },
    tokenizer: { kind: 'characters', alphabet: import 'lib/alphabet.libsonnet' },
    vocab_size: 128256,
    hidden_size: 4096,
    intermediate_size: 14336,
    num_layers: 32,
    num_heads: 32,
    num_kv_heads: 8,
    head_dim: 128,
    max_positions: 131072,
    rope_theta: 500000,
    rope_scaling: { kind: 'llama3', factor: 8, low_frequency_factor: 1, high_frequency_factor: 4, original_max_positions: 8192 },
    rms_norm_eps: 1e-5,
    tie_embeddings: false,
  },
}
