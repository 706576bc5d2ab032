// Dense Qwen3 with 1.6 M parameters and one token per character, for a laptop's CPU.
{
  model+: {
    family: 'qwen3',
    init+: { std: 0.02 },
    tokenizer: { kind: 'characters', alphabet: import 'lib/alphabet.libsonnet' },
    hidden_size: 256,
    intermediate_size: 512,
    num_layers: 2,
    num_heads: 8,
    num_kv_heads: 4,
    head_dim: 64,
    max_positions: 1024,
    rope_theta: 20,  // for words of a few letters. With a larger base most dimensions would hardly rotate
    rms_norm_eps: 1e-6,
    tie_embeddings: true,
  },
}
