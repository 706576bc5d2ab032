// Constraints on hidden settings, each with an error sentence. The schema cannot see hidden settings.
// lib/run.libsonnet adds them to every run. All other constraints are in manifest/schema/constraints.py.
local unknown(object, known) = [field for field in std.objectFieldsAll(object) if !std.member(known, field)];
local settings = ['layout', 'problems', 'context_tokens', 'answer_tokens', 'seeds'];
local layout = ['trainer_ranks', 'engines', 'prefill_engines', 'devices_per_engine'];
// Some fields of each section that lib/run.libsonnet and the axes set: `trainer: {…}` in place of `trainer+: {…}` loses them.
local sections = {
  layout: layout,
  model: ['family', 'moe', 'mla', 'fp8'],
  trainer: ['mesh', 'memory', 'optimizer'],
  inference: ['data_parallel', 'quantization', 'router'],
};
local sft = ['schedule', 'trained_roles', 'validation', 'data'];
local lost(object, fields) = if std.isObject(object) then [field for field in fields if !std.objectHas(object, field)] else [];
local replaces(path, fields, written) = '%s: replaces its defaults and lacks %s; write `%s {…}` to keep them' % [path, std.join(', ', fields), written];
// Counts above the schema's largest count would take too long here.
local dividing(whole) = [n for n in std.range(1, std.min(whole, 65536)) if whole % n == 0];
local listed(numbers) = std.join(', ', ['%d' % n for n in numbers]);

{
  local run = self,
  local mesh = run.trainer.mesh,
  local ranks = run.layout.trainer_ranks,
  local replica_ranks = ranks / mesh.dp_replicate,

  assert unknown(run, std.objectFields(run) + settings) == [] :
         'there is no setting %s; the settings are %s' % [std.join(', ', unknown(run, std.objectFields(run) + settings)), std.join(', ', settings)],
  assert unknown(run.layout, layout) == [] :
         'layout: there is no %s; layout has %s' % [std.join(', ', unknown(run.layout, layout)), std.join(', ', layout)],
  local replaced = [name for name in std.objectFields(sections) if lost(run[name], sections[name]) != []],
  local first = replaced[0],
  assert replaced == [] :
         replaces(first, lost(run[first], sections[first]), first + (if first == 'layout' then '+::' else '+:')),
  local mesh_lost = lost(mesh, ['dp_replicate', 'cp']),
  assert mesh_lost == [] : replaces('trainer.mesh', mesh_lost, 'mesh+:'),
  local sft_lost = if std.objectHas(run.stages, 'sft') then lost(run.stages.sft, sft) else [],
  assert sft_lost == [] : replaces('stages.sft', sft_lost, 'sft+:'),
  local no_numbers =
    ['layout.' + field for field in std.objectFields(run.layout) if !std.isNumber(run.layout[field])] +
    ['trainer.mesh.' + field for field in ['dp_replicate', 'cp'] if !std.isNumber(mesh[field])],
  assert no_numbers == [] : '%s: must be a number, such as 2' % no_numbers[0],
  assert unknown(run.seeds, ['training', 'warm_start', 'held_out']) == [] :
         'seeds: there is no %s; seeds has training, warm_start and held_out' % std.join(', ', unknown(run.seeds, ['training', 'warm_start', 'held_out'])),

  // dp_shard is the quotient of two settings, and must be whole
  assert ranks % mesh.dp_replicate == 0 :
         'trainer.mesh.dp_replicate: %d does not divide %d trainer ranks; choose dp_replicate from %s' % [
    mesh.dp_replicate,
    ranks,
    listed(dividing(if ranks % mesh.cp == 0 then ranks / mesh.cp else ranks)),
  ],
  assert replica_ranks % mesh.cp == 0 :
         'trainer.mesh: dp_replicate·cp = %d does not divide %d trainer ranks; choose cp from %s' % [
    mesh.dp_replicate * mesh.cp,
    ranks,
    listed(dividing(replica_ranks)),
  ],
  // the schema refuses a seed that is no number
  assert !std.isNumber(run.seed) || run.seed < 10000 :
         'seed: %d is not below 10000, where the seeds of warm-start and held-out problems begin' % run.seed,
}
