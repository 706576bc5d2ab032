// Problems with whole numbers as answers, from a file (docs/datasets.md). A fifth of the rows is held out. One turn, short answers.
// For another file change `data`. The verdict compares the reply's last number.
local data = { path: 'examples/problems/arithmetic.jsonl', sha256: std.sha256(importstr 'examples/problems/arithmetic.jsonl') };
{
  problems:: [
    {
      name: 'problem_file',
      kind: 'dataset',
      args: {
        source: { kind: 'source', split: null } + data,
        held_out: { kind: 'fraction', fraction: 0.2 },
        split: 'train',
        where: {},
        system: null,
        prompt: '{question}',
        answer: '{answer}',
        answer_pattern: null,
        verdict: { kind: 'exact', ignore_case: false, pattern: '(-?[0-9]+)' },
      },
      weight: 1,
      max_turns: 1,
    },
  ],
  context_tokens:: 256,
  orchestrator+: { sampling+: { max_tokens_per_turn: 16 }, rollout_timeout_s: 120 },
}
