// Constraints between axes, each with a sentence and its numbers. lib/run.libsonnet mixes them into every run.
// The schema does not see hidden settings, so misspelt ones are caught here.
local unknown(object, known) = [field for field in std.objectFieldsAll(object) if !std.member(known, field)];
local settings = ['layout', 'problems', 'context_tokens', 'answer_tokens', 'seeds'];
local layout = ['trainer_ranks', 'engines', 'prefill_engines', 'devices_per_engine'];
// Bounded by the schema's largest count, so that absurd counts do not take forever.
local up_to(most) = std.range(1, std.min(most, 65536));
local dividing(whole) = [n for n in up_to(whole) if whole % n == 0];
local listed(numbers) = std.join(', ', ['%d' % n for n in numbers]);
// Rules of the pipeline share a namespace with runs.
local targets = ['init', 'sft', 'rl', 'evaluate', 'report', 'all'];
local bytes = { float32: 4, bfloat16: 2 };

{
  local run = self,
  local mesh = run.trainer.mesh,
  local group = run.orchestrator.algorithm.group_size,
  local batch = run.orchestrator.rollouts_per_batch,
  local mla = run.model.mla,
  // each rank has the same number of query heads, and key heads of its own or a shared one
  local ulysses_ranks = [
    n
    for n in up_to(run.model.num_heads)
    if run.model.num_heads % n == 0 && (run.model.num_kv_heads % n == 0 || n % run.model.num_kv_heads == 0)
  ],
  local ranks = run.layout.trainer_ranks,
  local replica_ranks = ranks / mesh.dp_replicate,
  local context_ranks = [n for n in dividing(replica_ranks) if mesh.cp_style != 'ulysses' || std.member(ulysses_ranks, n)],
  local expert_ranks = [n for n in dividing(mesh.dp_shard * mesh.cp) if run.model.moe.num_experts % n == 0],
  // one token in one layer: latent, its rotary part and the indexer's key; or keys and values of a device's heads
  local kv_layer_numbers =
    if mla == null then 2 * std.max(1, std.floor(run.model.num_kv_heads / run.inference.tensor_parallel)) * run.model.head_dim
    else mla.kv_lora_rank + mla.rope_head_dim + mla.indexer.head_dim,
  local kv_block_bytes = run.inference.kv_block_tokens * run.model.num_layers * kv_layer_numbers * bytes[run.inference.dtype],
  // whole blocks, and the one that vLLM reserves
  local kv_longest_bytes = (1 + std.ceil(run.inference.max_model_len_tokens / run.inference.kv_block_tokens)) * kv_block_bytes,

  local per_node = run.hardware.devices_per_node,
  local per_replica = run.inference.data_parallel * run.inference.tensor_parallel,
  local prefill = run.inference.prefill_replicas,
  local groups = [
    [group[0], group[1], group[1] / per_node]
    for group in
      (if prefill == 0 then [] else [['prefill', prefill * per_replica]]) +
      [
        [if prefill == 0 then 'inference' else 'decode', (run.inference.num_replicas - prefill) * per_replica],
        ['trainer', mesh.dp_replicate * mesh.dp_shard * mesh.cp],
      ]
  ],
  local broken = [group for group in groups if group[2] != std.floor(group[2])],
  local num_nodes = std.foldl(function(sum, group) sum + group[2], groups, 0),

  assert unknown(run, std.objectFields(run) + settings) == [] :
         'there is no setting %s; the settings are %s' % [std.join(', ', unknown(run, std.objectFields(run) + settings)), std.join(', ', settings)],
  assert unknown(run.layout, layout) == [] :
         'layout: there is no %s; layout has %s' % [std.join(', ', unknown(run.layout, layout)), std.join(', ', layout)],
  assert unknown(run.seeds, ['training', 'warm_start', 'held_out']) == [] :
         'seeds: there is no %s; seeds has training, warm_start and held_out' % std.join(', ', unknown(run.seeds, ['training', 'warm_start', 'held_out'])),

  assert !std.member(targets, run.name) :
         "name: no run is called '%s', for the pipeline has a rule of that name; try 'my_%s'" % [run.name, run.name],

  assert ranks % mesh.dp_replicate == 0 :
         'trainer.mesh.dp_replicate: %d does not divide %d trainer ranks; choose dp_replicate from %s' % [
    mesh.dp_replicate,
    ranks,
    listed(dividing(if ranks % mesh.cp == 0 then ranks / mesh.cp else ranks)),
  ],
  assert mesh.cp == 1 || mesh.cp_style != 'ulysses' || std.member(ulysses_ranks, mesh.cp) :
         "trainer.mesh.cp: %d query heads and %d key heads do not divide among %d ranks; choose cp from %s%s" % [
    run.model.num_heads,
    run.model.num_kv_heads,
    mesh.cp,
    listed(context_ranks),
    if replica_ranks % mesh.cp == 0 then ", or cp_style 'ring'" else '',
  ],
  assert replica_ranks % mesh.cp == 0 :
         'trainer.mesh: dp_replicate·cp = %d does not divide %d trainer ranks; choose cp from %s' % [
    mesh.dp_replicate * mesh.cp,
    ranks,
    listed(context_ranks),
  ],
  assert run.model.num_heads % run.model.num_kv_heads == 0 :
         'model.num_kv_heads: %d does not divide num_heads = %d' % [run.model.num_kv_heads, run.model.num_heads],

  assert prefill < run.inference.num_replicas :
         'inference.prefill_replicas: %d of %d engines leave none to decode' % [prefill, run.inference.num_replicas],
  assert run.hardware.num_nodes == 1 || per_node % per_replica == 0 :
         'inference.data_parallel·tensor_parallel: %d does not divide the %d devices of a node, and no engine spans nodes' % [
    per_replica,
    per_node,
  ],
  assert run.hardware.num_nodes == 1 || broken == [] :
         'hardware.devices_per_node: %s has %d devices, which fill no whole number of nodes of %d' % [broken[0][0], broken[0][1], per_node],
  assert run.hardware.num_nodes == 1 || num_nodes == run.hardware.num_nodes :
         'hardware.num_nodes: %s nodes are %d, not %d' % [
    std.join(' + ', ['%s %d' % [group[0], group[2]] for group in groups]),
    num_nodes,
    run.hardware.num_nodes,
  ],

  // after the constraints of nodes, so that the devices of experts are right
  assert run.model.moe != null || mesh.ep == 1 :
         "trainer.mesh.ep: %d, but family '%s' has no experts to spread; set ep to 1" % [mesh.ep, run.model.family],
  assert run.model.moe == null || std.member(expert_ranks, mesh.ep) :
         'trainer.mesh.ep: %d does not divide %s; choose ep from %s' % [
    mesh.ep,
    if (mesh.dp_shard * mesh.cp) % mesh.ep != 0 then 'dp_shard·cp = %d' % (mesh.dp_shard * mesh.cp)
    else 'model.moe.num_experts = %d' % run.model.moe.num_experts,
    listed(expert_ranks),
  ],

  assert batch % group == 0 :
         'orchestrator.rollouts_per_batch: %d is not a multiple of the group size %d; try %d' % [batch, group, std.max(1, std.floor(batch / group)) * group],
  assert run.orchestrator.admission.max_in_flight >= group :
         'orchestrator.admission.max_in_flight: %d cannot hold one group of %d rollouts' % [run.orchestrator.admission.max_in_flight, group],
  assert run.inference.max_model_len_tokens <= run.model.max_positions :
         'context_tokens: %d exceed model.max_positions = %d' % [run.inference.max_model_len_tokens, run.model.max_positions],
  assert run.orchestrator.sampling.max_tokens_per_turn < run.inference.max_model_len_tokens :
         'orchestrator.sampling.max_tokens_per_turn: %d leave no room for a prompt in a context of %d tokens' % [
    run.orchestrator.sampling.max_tokens_per_turn,
    run.inference.max_model_len_tokens,
  ],
  assert run.trainer.memory.max_tokens_per_micro_batch >= run.inference.max_model_len_tokens :
         'trainer.memory.max_tokens_per_micro_batch: %d cannot hold one rollout of %d tokens' % [
    run.trainer.memory.max_tokens_per_micro_batch,
    run.inference.max_model_len_tokens,
  ],
  assert run.inference.kv_cache_bytes >= kv_longest_bytes :
         'inference.kv_cache_bytes: %d cannot hold one rollout of %d tokens, which needs %d' % [
    run.inference.kv_cache_bytes,
    run.inference.max_model_len_tokens,
    kv_longest_bytes,
  ],
  assert std.length(std.set([p.name for p in run.problems])) == std.length(run.problems) :
         'problems: the names %s are not all different' % std.join(', ', [p.name for p in run.problems]),
  assert run.seed < 10000 :
         'seed: %d is not below 10000, where the seeds of warm-start and held-out problems begin' % run.seed,
}
