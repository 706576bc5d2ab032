// GLM-5: 743 B parameters, 40 B active, 256 experts, latent attention over the 2048 tokens that an indexer chooses.
{
  model+: {
    family: 'glm5',
    // init checks it against the weights: cd weights/GLM-5; sha256sum model-*.safetensors | sha256sum
    init: { kind: 'pretrained', path: 'weights/GLM-5', revision: 'main', sha256: std.repeat('0', 64) },
    // init checks it against the tokenizer's files
    tokenizer: { kind: 'pretrained', path: 'weights/GLM-5', sha256: std.repeat('0', 64) },
    vocab_size: 154880,
    hidden_size: 6144,
    intermediate_size: 12288,
    num_layers: 78,
    num_heads: 64,
    num_kv_heads: 64,
    head_dim: 256,
    max_positions: 202752,
    rope_theta: 1000000,
    rms_norm_eps: 1e-5,
    tie_embeddings: false,
    num_mtp_layers: 1,
    moe: {
      num_experts: 256,
      num_experts_per_token: 8,
      expert_intermediate_size: 2048,
      normalize_top_k: true,
      num_dense_layers: 3,
      num_shared_experts: 1,
      score: 'sigmoid',
      routed_scale: 2.5,
    },
    mla: {
      q_lora_rank: 2048,
      kv_lora_rank: 512,
      nope_head_dim: 192,
      rope_head_dim: 64,
      value_head_dim: 256,
      indexer: { num_heads: 32, head_dim: 128, top_k: 2048, types: null },
    },
  },
}
