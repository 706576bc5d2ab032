// Laws: what must hold between axes, each a sentence with the numbers in it. Mixed into every run by lib/run.libsonnet.
// Hidden settings never reach the schema, so a misspelt one is caught here.
local unknown(object, known) = [field for field in std.objectFieldsAll(object) if !std.member(known, field)];
local settings = ['layout', 'problems', 'context_tokens', 'seeds'];
// Rules of the pipeline, which share one namespace with runs.
local targets = ['init', 'sft', 'rl', 'evaluate', 'report', 'all'];
local bytes = { float32: 4, bfloat16: 2 };

{
  local run = self,
  local mesh = run.trainer.mesh,
  local group = run.orchestrator.algorithm.group_size,
  local batch = run.orchestrator.rollouts_per_batch,
  local kv_token_bytes = 2 * run.model.num_layers * run.model.num_kv_heads * run.model.head_dim * bytes[run.inference.dtype],

  assert unknown(run, std.objectFields(run) + settings) == [] :
         'there is no setting %s; the settings are %s' % [std.join(', ', unknown(run, std.objectFields(run) + settings)), std.join(', ', settings)],
  assert unknown(run.layout, ['trainer_ranks', 'engines']) == [] :
         'layout: there is no %s; layout has trainer_ranks and engines' % std.join(', ', unknown(run.layout, ['trainer_ranks', 'engines'])),
  assert unknown(run.seeds, ['training', 'warm_start', 'held_out']) == [] :
         'seeds: there is no %s; seeds has training, warm_start and held_out' % std.join(', ', unknown(run.seeds, ['training', 'warm_start', 'held_out'])),

  assert !std.member(targets, run.name) :
         "name: no run is called '%s', for the pipeline has a rule of that name; try 'my_%s'" % [run.name, run.name],

  assert run.layout.trainer_ranks % (mesh.dp_replicate * mesh.cp) == 0 :
         'trainer.mesh: dp_replicate·cp = %d does not divide %d trainer ranks' % [mesh.dp_replicate * mesh.cp, run.layout.trainer_ranks],
  assert (mesh.dp_shard * mesh.cp) % mesh.ep == 0 :
         'trainer.mesh.ep: %d does not divide dp_shard·cp = %d; choose ep from %s' % [
    mesh.ep,
    mesh.dp_shard * mesh.cp,
    std.join(', ', ['%d' % n for n in std.range(1, mesh.dp_shard * mesh.cp) if (mesh.dp_shard * mesh.cp) % n == 0]),
  ],
  assert run.model.moe == null || run.model.moe.num_experts % mesh.ep == 0 :
         'trainer.mesh.ep: %d does not divide model.moe.num_experts = %d' % [mesh.ep, run.model.moe.num_experts],
  assert run.model.num_heads % run.model.num_kv_heads == 0 :
         'model.num_kv_heads: %d does not divide num_heads = %d' % [run.model.num_kv_heads, run.model.num_heads],

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
  assert run.inference.kv_cache_bytes >= kv_token_bytes * run.inference.max_model_len_tokens :
         'inference.kv_cache_bytes: %d cannot hold one rollout of %d tokens, which needs %d' % [
    run.inference.kv_cache_bytes,
    run.inference.max_model_len_tokens,
    kv_token_bytes * run.inference.max_model_len_tokens,
  ],
  assert std.length(std.set([p.name for p in run.problems])) == std.length(run.problems) :
         'problems: the names %s are not all different' % std.join(', ', [p.name for p in run.problems]),
  assert run.seed < 10000 :
         'seed: %d is not below 10000, where the seeds of warm-start and held-out problems begin' % run.seed,
}
