// Problems with answers from a file or a fetched dataset, one turn each: (import 'tasks/dataset.libsonnet')({ path: 'problems.jsonl' }).
// packages/orrery/tasks/dataset.py explains the settings. A path is relative to the checkout.
function(settings) {
  local defaults = {
    name: 'dataset',
    path: error 'tasks/dataset.libsonnet: say the path of the problems, for example { path: "problems.jsonl" }',
    file_split: null,  // the split of a folder
    // the rows that are evaluated, not trained: a share, { column, values }, or { path, file_split } of their own
    held_out: 0.125,
    where: {},
    system: null,
    prompt: '{question}',
    answer: '{answer}',
    answer_pattern: null,
    verdict: { kind: 'exact' },
    weight: 1,
    context_tokens: 1024,
    answer_tokens: 512,
    timeout_s: 600,
  },
  local given = defaults + settings,
  local unknown = [name for name in std.objectFields(settings) if !std.objectHas(defaults, name)],
  assert unknown == [] : 'tasks/dataset.libsonnet: there is no setting %s; the settings are %s' % [std.join(', ', unknown), std.join(', ', std.objectFields(defaults))],
  local source(path, split) = { kind: 'source', path: path, sha256: std.native('sha256')(path), split: split },
  local verdicts = {
    math: { boxed: false },
    exact: { ignore_case: true, pattern: null },
    choice: { num_choices: 4 },
    python: { path: error 'verdict.path: name the file of your reward function', sha256: std.native('sha256')(self.path), 'function': 'reward' },
  },
  problems:: [
    {
      name: given.name,
      kind: 'dataset',
      args: {
        source: source(given.path, given.file_split),
        held_out:
          if std.isNumber(given.held_out) then { kind: 'fraction', fraction: given.held_out }
          else if std.objectHas(given.held_out, 'column') then { kind: 'column' } + given.held_out
          else source(given.held_out.path, std.get(given.held_out, 'file_split')),
        split: 'train',
        where: given.where,
        system: given.system,
        prompt: given.prompt,
        answer: given.answer,
        answer_pattern: given.answer_pattern,
        verdict: std.get(verdicts, given.verdict.kind, {}) + given.verdict,
      },
      weight: given.weight,
      max_turns: 1,
    },
  ],
  context_tokens:: given.context_tokens,
  orchestrator+: { sampling+: { max_tokens_per_turn: given.answer_tokens }, rollout_timeout_s: given.timeout_s },
}
