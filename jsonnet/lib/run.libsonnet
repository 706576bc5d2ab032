// A run: the fields that axes must set, and the late-bound values that follow from several axes.
// A run file adds one axis of each kind, then its own fields: run + model + hardware + algorithm + tasks + memory + { ... }.
// Hidden fields (::) are settings for derived fields. lib/constraints.libsonnet lists their names.
// All software affects the result, so the lock's hash is part of the id.
// Each lock is hashed once, because it has half a megabyte.
local cpu_lock = std.sha256(importstr 'locks/cpu.txt');
local cuda_lock = std.sha256(importstr 'locks/cuda.txt');

(import 'lib/constraints.libsonnet') + {
  local run = self,

  schema_version: 3,
  name: error 'name: a run takes its name from lib/named.libsonnet',
  seed: error 'seed: say it in the run file, for example seed: 1',
  python_lock_sha256: if self.hardware.accelerator == 'cpu' then cpu_lock else cuda_lock,

  // Settings: numbers of processes (set by hardware), and the problems and their context (set by tasks).
  layout:: error 'layout: no hardware axis; add (import "hardware/cpu.libsonnet")',
  problems:: error 'problems: no task axis; add (import "tasks/reverse_text.libsonnet")',
  context_tokens:: error 'context_tokens: no task axis; add (import "tasks/reverse_text.libsonnet")',

  model: {
    family: error 'model: no model axis; add (import "models/qwen3_tiny.libsonnet")',
    init: { kind: 'random', seed: run.seed },
    // the chat format adds 8 special tokens
    vocab_size: 8 + std.length(self.tokenizer.alphabet),
    rotary_fraction: 1.0,
    rope_scaling: null,
    attention_bias: false,
    qk_norm: std.member(['qwen3', 'qwen3_moe'], self.family),
    moe: null,
    mla: null,
    hf_config: null,
    num_mtp_layers: 0,
    fp8: null,
  },

  hardware: { accelerator: error 'hardware: no hardware axis; add (import "hardware/cpu.libsonnet")', shared_devices: false },

  trainer: {
    mesh: {
      dp_replicate: 1,
      dp_shard: run.layout.trainer_ranks / (self.dp_replicate * self.cp),
      cp: 1,
      ep: 1,
      cp_style: if run.model.mla == null then 'ulysses' else 'dsa',
      ep_backend: 'torch',
      ep_chunks: 1,
      deepep_num_sms: null,
      deepep_token_chunk_size: null,
    },
    fsdp: { reshard_after_forward: true, reduce_gradients: 'step', cpu_offload: false },
    attention: 'auto',
    compile: run.hardware.accelerator != 'cpu' && run.model.family != 'hugging_face',
    lora: null,
    indexer: 'frozen',
    indexer_choice: 'own',
    expert_bias_rate: null,
    elastic: null,
    // Far above the values of tokens up to eight versions old, far below those of forged answers. In float32 engine and
    // trainer agree on a canary to rounding. bfloat16 and FP8 round more, and a mixture may choose other experts for a token.
    mismatch: {
      warn_kl: 2.0,
      stop_kl: 10.0,
      warn_logprob_difference: 1.5,
      stop_logprob_difference: 3.0,
      canary_logprob_difference:
        if run.inference.quantization != 'none' && run.model.fp8 == null then 2.0
        else if run.inference.dtype == 'float32' && run.trainer.compute_dtype == 'float32' then 1e-3
        else 1.0,
    },
    optimizer: { kind: error 'trainer.optimizer: no algorithm axis; add (import "algorithms/grpo.libsonnet")' },
    memory: {
      activation_checkpointing: error 'trainer.memory: no memory axis; add (import "memory/plain.libsonnet")',
      activation_checkpointing_every: 1,
      activation_offload: false,
      activation_offload_max_in_flight: 1,
      lm_head_keeps_logits: false,
      optimizer_offload: false,
      optimizer_offload_resident: 0,
    },
    checkpoint: { interval_steps: error 'trainer.checkpoint.interval_steps: say it in the run file', keep: 2 },
  },

  inference: {
    num_replicas: run.layout.engines,
    prefill_replicas: run.layout.prefill_engines,
    nodes_per_replica: 1,
    // prefill engines have the shape of the others, or their own: prefill: self.shape { data_parallel: 8 }
    prefill: null,
    // prompts that lack more tokens than this in a decode engine's cache go to a prefill engine
    max_local_prefill_tokens: 0,
    local engine = self,
    shape:: {
      nodes_per_replica: engine.nodes_per_replica,
      tensor_parallel: engine.tensor_parallel,
      data_parallel: engine.data_parallel,
      expert_parallel: engine.expert_parallel,
      kv_cache_bytes: engine.kv_cache_bytes,
      max_num_sequences: engine.max_num_sequences,
      max_batched_tokens: engine.max_batched_tokens,
      enforce_eager: engine.enforce_eager,
      all2all_backend: engine.all2all_backend,
      dual_batch_overlap: engine.dual_batch_overlap,
      environment: engine.environment,
    },
    all2all_backend: 'allgather_reducescatter',
    dual_batch_overlap: false,
    environment: {},
    data_parallel: 1,
    tensor_parallel: run.layout.devices_per_engine / self.data_parallel,
    expert_parallel: run.model.moe != null && self.data_parallel * self.tensor_parallel > 1,
    quantization: if run.model.fp8 == null then 'none' else 'fp8',
    kv_transfer: { kind: if run.layout.prefill_engines == 0 then 'none' else 'nixl' },
    kv_offload: { kind: 'none' },
    max_restarts: 0,
    max_model_len_tokens: run.context_tokens,
    // each engine can hold all rollouts in flight, however the router spreads them
    max_num_sequences: run.orchestrator.admission.max_in_flight,
    // with prefill engines, the orchestrator sends requests to both engines itself
    router: if run.layout.engines == 1 || run.layout.prefill_engines > 0 then { kind: 'none' } else {
      kind: 'vllm_router',
      policy: 'cache_aware',
      // vllm-router's default thresholds would send all requests of a small pool to one engine
      balance_abs_threshold: if self.policy == 'cache_aware' then 2,
      balance_rel_threshold: if self.policy == 'cache_aware' then 1.1,
    },
  },

  orchestrator: {
    algorithm: { kind: error 'orchestrator.algorithm: no algorithm axis; add (import "algorithms/grpo.libsonnet")' },
    rollouts_per_batch: error 'orchestrator.rollouts_per_batch: say it in the run file',
    keep_batches: 500,
    // a run file may set the held-out reward at which RL ends early
    evaluation: { stop_at: null },
    guests: null,
  },

  transport: { rollouts: 'zmq', weights: 'files', routed_experts: false },

  // Seeds of problems are disjoint (see constraints). Training problems depend on the run's seed, held-out problems do not.
  seeds:: { training: run.seed, warm_start: 10000 + run.seed, held_out: 20000 },
  // Tasks with the argument `split` also keep both sides' texts apart.
  local of_side(args, split) = args + if std.objectHas(args, 'split') then { split: split } else {},
  // A task inside `few_shot` has its own `args`.
  local side(problem, split) =
    of_side(problem.args, split) + if std.objectHas(problem.args, 'args') then { args: of_side(problem.args.args, split) } else {},
  tasks: {
    train: [problem { seed: run.seeds.training, args: side(problem, 'train') } for problem in run.problems],
    evaluation: [problem { seed: run.seeds.held_out, args: side(problem, 'held_out') } for problem in run.problems],
  },

  stages: {
    // `sft: null` in the run file skips SFT.
    sft: {
      num_steps: error 'stages.sft.num_steps: say it in the run file, or stages+: { sft: null } to leave the warm start out',
      examples_per_batch: error 'stages.sft.examples_per_batch: say it in the run file',
      optimizer: run.trainer.optimizer,
      schedule: { kind: 'constant', warmup_steps: 0 },
      max_grad_norm: run.trainer.max_grad_norm,
      trained_roles: ['assistant'],
      validation: null,
      data: {
        kind: 'demonstrations',
        task: run.problems[0] { seed: run.seeds.warm_start },
        num_problems: error 'stages.sft.data.num_problems: say it in the run file',
      },
    },
    rl: { num_steps: error 'stages.rl.num_steps: say it in the run file' },
    evaluate: { num_problems: error 'stages.evaluate.num_problems: say it in the run file', rollouts_per_problem: 1 },
  },
}
